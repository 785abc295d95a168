"""Streams a dataset by Hugging Face's package `datasets`: `dataset_type=hf`, of the hub or of a local folder."""

import functools
import os
import re

import jax

from src.config.source_spec import SourceSpec
from src.data.readers import files
from src.data.readers.custom import document_of
from src.data.readers.records import Nulls
from src.data.streams import StreamSource
from src.data.types import Fingerprint, InputSpec
from src.errors import UserError
from src.user_code import call


def open_hf(spec: SourceSpec, inputs: InputSpec) -> StreamSource:
    """Opens this host's share of a split: each N-th file, or each N-th row where N hosts do not divide the files.

    `dataset_path` is a folder or a dataset of the hub, NAME, ORG/NAME or either with @REVISION, and `dataset_name` one
    of its configurations. Raises UserError where there is no such dataset, revision, split or column, or `datasets` is
    not installed.
    """
    try:
        import datasets
        from datasets.distributed import split_dataset_by_node
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(f"dataset_type=hf: {error.name} is not installed. bash setup.sh streams installs it") from error
    path, what, commit = os.path.expanduser(spec.dataset_path), spec.setting("dataset_path"), None
    listings: list[files.Listing] = []
    facts: Fingerprint = {"type": "hf", "dataset": spec.dataset_path, "split": spec.split}
    facts["column"] = spec.dataset_column
    if os.path.isdir(path):
        listings = [files.list_files(path, spec.key("dataset_path"), inputs.rules)]
        facts |= {"dataset": "", **listings[0].fingerprint}
    elif match := re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?", path):
        path, revision = match.groups()
        commit = call(what, lambda: HfApi().dataset_info(path, revision=revision).sha)
        facts |= {"dataset": path, "commit": commit}  # else a run would go on with whatever the hub has by then
    keys = {"split": spec.split, "revision": commit, "streaming": True}
    whole = call(what, functools.partial(datasets.load_dataset, path, spec.dataset_name or None, **keys))
    facts |= {"configuration": spec.dataset_name, "shards": whole.num_shards}
    read = functools.partial(document_of, what, spec.dataset_column, inputs.vocab_size, Nulls(what))
    share = split_dataset_by_node(whole, jax.process_index(), jax.process_count())
    stream = StreamSource(what, share, read, facts, shuffles=True)
    stream.listings = listings
    return stream
