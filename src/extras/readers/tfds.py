"""Reads a dataset prepared by TFDS: `dataset_type=tfds`.

TFDS finds a split's records and the types of its features, without the code of the dataset's builder or TensorFlow. The
records are read from ArrayRecord or TFRecord files, extracting only the wanted feature.
"""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from src.config.dataset_spec import DatasetSpec
from src.data.readers import files, find_files
from src.data.types import InputSpec
from src.extras.readers.array_record import RecordRange, RecordSource, check_store, count_records, open_reader
from src.extras.readers.tfrecord import TfRecordReader, indices
from src.system.errors import UserError, first_few
from src.system.storage_errors import attempted

if TYPE_CHECKING:
    from tensorflow_datasets.core import DatasetInfo
    from tensorflow_datasets.core.features import TensorInfo
    from tensorflow_datasets.core.utils.shard_utils import FileInstruction

_INFO = "dataset_info.json"
_FORMAT, _SLOWER_FORMAT = "array_record", "tfrecord"
_VERSION = re.compile(r"\d+\.\d+\.\d+")


class TfdsSource(RecordSource):
    """Reads a split of a prepared dataset, or slices of splits (train[:10%]), in TFDS's order.

    `dataset_name` is NAME, NAME/CONFIG, or either with :VERSION; the default is the newest version. `dataset_path` is
    the data folder that contains NAME; the default is TFDS's own. ArrayRecord files are preferred to TFRecord files.
    Raises UserError if there is no such dataset or split, no file in either format, a missing or damaged file, or if
    `dataset_column` is neither text nor ids; also as `check_store` and `RecordSource` do.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        check_store(spec)
        folder = attempted(spec.setting("dataset_path"), lambda: _find(spec))
        info = _read_info(spec, folder)
        _check_feature(spec, info.features)
        slices = _file_slices(spec, info)
        listing, open_file = _check_files(spec, info, slices)
        ranges = [RecordRange(each.filename, each.skip, each.take) for each in slices]
        fingerprint: dict[str, Any] = {"type": "tfds", "dataset": info.full_name, "split": spec.split}
        super().__init__(spec, ranges, "example", listing, fingerprint, open_file)


def _find(spec: DatasetSpec) -> str:
    root = os.path.expanduser(spec.dataset_path or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    full_name = spec.dataset_name
    name, _, version = full_name.partition(":")
    names = [info.parent.name for info in epath.Path(root, name).glob(f"*/{_INFO}")]
    versions = list(filter(_VERSION.fullmatch, names))
    if versions and version in ("", *versions):
        newest = max(versions, key=lambda version: [int(part) for part in version.split(".")])
        return os.path.join(root, name, version or newest)
    infos = [info for depth in ("*/*", "*/*/*") for info in epath.Path(root).glob(f"{depth}/{_INFO}")]
    folders = sorted(info.parent.relative_to(epath.Path(root)) for info in infos)
    prepared = [f"{folder.parent}:{folder.name}" for folder in folders]
    where = spec.setting("dataset_path") if spec.dataset_path else f"{root}, TFDS's own data folder"
    listed = f"There: {first_few(prepared, near=full_name)}" if prepared else "No dataset is"
    raise UserError(
        f"{spec.setting('dataset_name')} is not prepared in {where}. {listed}. On a machine with TensorFlow, this "
        f"prepares the version that its TFDS has: tfds build {name} --file_format={_FORMAT} --data_dir={root}"
    )


def _read_info(spec: DatasetSpec, folder: str) -> "DatasetInfo":
    import tensorflow_datasets as tfds

    try:
        info = tfds.builder_from_directory(folder).info
        formats = {each.value for each in info.available_file_formats()}
        for each in (_FORMAT, _SLOWER_FORMAT):
            if each in formats:
                info.set_file_format(each, override=True, override_if_initialized=True)
                return info
    except Exception as error:  # of many types: from JSON, protocol buffers, files, and TFDS itself
        raise UserError(f"{spec.setting('dataset_name')}: TFDS can't read {folder}: {error}") from error
    raise UserError(
        f"{spec.setting('dataset_name')} is stored as {', '.join(sorted(formats))} in {folder}, which can't be read in "
        f"any order. Where TensorFlow, apache-beam and mlcroissant are installed too, this adds a copy that can: tfds "
        f"convert_format --dataset_version_dir={os.path.abspath(folder)} --out_file_format={_FORMAT}"
    )


def _check_feature(spec: DatasetSpec, features: Any) -> None:
    names = _flat(features)
    setting = spec.setting("dataset_column")
    if spec.dataset_column not in names:
        listed = first_few(sorted(names), near=spec.dataset_column)
        raise UserError(f"{setting}: {spec.dataset_name} has no such feature. Its features: {listed}")
    # Compare a feature's type as it is read and as it is stored: images and compressed lists are stored as strings too.
    trees = features.get_tensor_info(), features.get_serialized_info()
    read, stored = (_flat(tree)[spec.dataset_column] for tree in trees)
    if _kind(read) is None or _kind(read) != _kind(stored):
        raise UserError(
            f"{setting} of {spec.dataset_name} is neither a text nor a plain list of ids, but "
            f"{names[spec.dataset_column]!r}"
        )


def _kind(tensor: "TensorInfo") -> str | None:
    if tensor.shape == () and tensor.np_dtype in (np.object_, np.str_, np.bytes_):
        return "text"
    return "ids" if len(tensor.shape) == 1 and np.issubdtype(tensor.np_dtype, np.integer) else None


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts to one, by the leaves' names in a record: their keys, joined by /."""
    if not hasattr(tree, "items"):
        return {prefix[:-1]: tree}
    return {name: leaf for key, value in tree.items() for name, leaf in _flat(value, f"{prefix}{key}/").items()}


def _file_slices(spec: DatasetSpec, info: "DatasetInfo") -> "list[FileInstruction]":
    splits = ", ".join(f"{name} ({split.num_examples:,} examples)" for name, split in info.splits.items())
    setting = spec.setting("split")
    try:
        slices = info.splits[spec.split].file_instructions
    except (ValueError, KeyError, AssertionError) as error:
        raise UserError(f"{setting}: {str(error).splitlines()[0]} The splits of {info.full_name}: {splits}") from error
    if not slices:
        raise UserError(f"{setting} has no example. The splits of {info.full_name}: {splits}")
    return slices


def _check_files(
    spec: DatasetSpec, info: "DatasetInfo", slices: "list[FileInstruction]"
) -> tuple[files.Listing, Callable[[str, str], Any]]:
    """Lists a split's files; also returns `open_file` for `RecordSource`.

    Raises UserError if a file is missing, or has another number of records than TFDS wrote.
    """
    expected = {each.filename: each.examples_in_shard for each in slices}
    names, folder = list(expected), str(info.data_dir)
    if files.is_remote(folder):
        sizes_of = find_files.list_files(folder, spec.key("dataset_path")).sizes
    else:
        sizes_of = {Path(name).name: find_files.size(name) for name in names if os.path.isfile(name)}
    if missing := [name for name in map(os.path.basename, names) if name not in sizes_of]:
        raise UserError(
            f"{spec.setting('dataset_name')}: {len(missing)} of {len(names)} files are missing in {info.data_dir}: "
            f"{first_few(missing)}"
        )
    sizes, open_file = [sizes_of[os.path.basename(name)] for name in names], open_reader
    if info.file_format.value == _FORMAT:
        counts = files.in_threads(count_records, names, sizes)
    else:
        starts = dict(zip(names, indices(names, sizes), strict=True))
        counts, open_file = [len(each) - 1 for each in starts.values()], functools.partial(TfRecordReader, starts)
    for name, count in zip(names, counts, strict=True):
        if count != expected[name]:
            raise UserError(
                f"{name} has {count:,} records, but {_INFO} next to it says {expected[name]:,}: restore the file"
            )
    return files.Listing(folder, dict(zip(map(os.path.basename, names), sizes, strict=True))), open_file


def open_source(spec: DatasetSpec, inputs: InputSpec) -> TfdsSource:
    """Opens the prepared dataset `dataset_name`; raises as `TfdsSource` does."""
    return TfdsSource(spec)
