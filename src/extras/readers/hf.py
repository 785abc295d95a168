"""Streams a dataset with Hugging Face's package `datasets`: `dataset_type=hf`, from the hub or a local folder."""

import functools
import os
import re
from collections.abc import Iterable, Mapping

import jax

from src.config.dataset_spec import DatasetSpec
from src.data.readers import files, find_files
from src.data.readers.records import Nulls
from src.data.types import Fingerprint, InputSpec
from src.extras.readers.custom import document_of
from src.extras.readers.streams import StreamSource
from src.system.errors import UserError, first_few
from src.system.user_code import call


def open_source(spec: DatasetSpec, inputs: InputSpec) -> StreamSource:
    """Opens this host's documents of a split.

    With N hosts, each has every N-th file, or every N-th row if N does not divide the number of files.
    `dataset_path` is a folder or a dataset on the hub, NAME, ORG/NAME or either with @REVISION, and `dataset_name` one
    of its configurations. Raises UserError if there is no such dataset, revision, configuration or split, or if its
    files are outside of it, TransientError if the hub does not answer; a missing column raises UserError when a
    document is read.
    """
    import datasets
    from datasets.distributed import split_dataset_by_node
    from huggingface_hub import HfApi

    path, what, commit = os.path.expanduser(spec.dataset_path), spec.setting("dataset_path"), None
    listings: list[files.Listing] = []
    fingerprint: Fingerprint = {"type": "hf", "dataset": spec.dataset_path, "split": spec.split}
    fingerprint["column"] = spec.dataset_column
    if os.path.isdir(path):
        listings = [find_files.list_files(path, spec.key("dataset_path"), inputs.rules)]
        fingerprint |= {"dataset": "", **listings[0].fingerprint}
    elif match := re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?", path):
        path, revision = match.groups()
        commit = call(what, lambda: HfApi().dataset_info(path, revision=revision).sha)
        fingerprint |= {"dataset": path, "commit": commit}  # pinned: a resumed run must not use a later version
    builder = call(what, lambda: datasets.load_dataset_builder(path, spec.dataset_name or None, revision=commit))
    _check_inside(what, path, builder.config.data_files or {})
    whole = call(what, builder.as_streaming_dataset, spec.split)
    fingerprint |= {"configuration": spec.dataset_name, "shards": whole.num_shards}
    read = functools.partial(document_of, what, spec.dataset_column, inputs.vocab_size, Nulls(what))
    share = split_dataset_by_node(whole, jax.process_index(), jax.process_count())
    stream = StreamSource(what, share, read, fingerprint, shuffles=True)
    stream.listings = listings
    return stream


def _check_inside(what: str, path: str, data_files: Mapping[str, Iterable[str]]) -> None:
    """Raises UserError if a dataset's files, which its README.md may name, are outside of its folder or the hub."""
    root = os.path.realpath(path)
    if os.path.basename(os.path.dirname(root)) == "snapshots":  # in the hub's cache, files are links to ../../blobs
        root = os.path.dirname(os.path.dirname(root))
    inside = f"{root}/" if os.path.isdir(path) else "hf://datasets/"
    names = [name for of_split in data_files.values() for name in of_split]
    places = {name: name if "://" in name else os.path.realpath(name) for name in names}
    if outside := [name for name, place in places.items() if not place.startswith(inside)]:
        raise UserError(f"{what}: its files must be within it, but these are not: {first_few(outside)}")
