"""Reads the weights of a Hugging Face folder onto devices: each process reads the slices for its own devices."""

import functools
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from src.checkpoint.format import Restored
from src.config.model_folders import has_tokenizer
from src.extras.hf.folder import HfFolder, open_folder
from src.extras.hf.folder_tokenizer import folder_tokenizer
from src.extras.hf.model_keys import folder_model, read_model_keys
from src.extras.hf.peft import base_model
from src.extras.hf.safetensors import DTYPES, UNREADABLE, Tensor
from src.extras.hf.tensor_map import Piece, Range, WeightPath, lay_out
from src.model.params import Tree, by_path, nested
from src.system.errors import UserError, first_few

ROWS = 4096  # number of rows of two tensors that `_differ` compares at a time


TAIL_BYTES = 2**16  # read at the end of each file; training changes these bytes too


def load_weights(path: str | os.PathLike[str], tree: Tree, notes: list[str] | None = None) -> Tree:
    """Replaces the leaves of `tree`, nested dicts of `jax.ShapeDtypeStruct`s with shardings, with the folder's weights.

    Weights go to the devices one tensor at a time, so host memory holds only one. Padded vocabulary rows are zeros.
    `notes` is as in `match_tensors`. Raises UserError if the folder cannot be read (folder.py), or if its tensors do
    not match the model.
    """
    leaves, arrays = by_path(tree), dict[WeightPath, _PartialArray]()
    for piece, tensor in progress(match_tensors(open_folder(path), tree, notes), f"reading {path}"):
        if piece.weight not in arrays:
            arrays[piece.weight] = _PartialArray(leaves[piece.weight])
        arrays[piece.weight].put(piece, tensor)
    return nested({weight: array.whole() for weight, array in arrays.items()})


def restore_folder(path: str, folder: str, tree: Tree) -> Restored:
    """Loads the weights in `folder`; the meta has its `vocab_size` and `tokenizer`, the tokenizer's fingerprint.

    `tokenizer` is None if the folder has no tokenizer or a malformed one. `path` is the folder's name in messages.
    Raises UserError as `load_weights` does.
    """
    notes: list[str] = []
    arrays = load_weights(folder, tree, notes)
    vocab_size = read_model_keys(folder)["vocab_size"]
    meta: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer": None}
    if has_tokenizer(place := Path(folder).expanduser()):
        try:
            meta["tokenizer"] = folder_tokenizer(place, vocab_size).fingerprint()
        except UserError as error:
            notes.append(f"the tokenizer of these weights is unknown: {error}")
    return Restored(arrays, meta, [*notes, f"read the weights of {path}."])


def folder_identity(path: str, identity: Callable[[str], str]) -> str:
    """Returns a CRC-32, in hex, of the names, sizes and last bytes of a folder's weight files.

    It identifies the weights: training changes the last bytes too. If the folder has adapters, it also covers their
    base model, of which `identity` gives the hex number. Raises UserError as `base_model` does.
    """
    folder = Path(path).expanduser()
    crc = int(identity(base), 16) if (base := base_model(folder)) else 0
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            crc = zlib.crc32(f"{file.name} {size}".encode() + stream.read(), crc)
    return f"{crc:08x}"


def match_tensors(folder: HfFolder, tree: Tree, notes: list[str] | None = None) -> list[tuple[Piece, Tensor]]:
    """Matches pieces of the weights in `tree` with the folder's tensors; raises UserError that lists mismatches.

    `notes` gets lines on tensors that are not part of the model: of vision, audio or extra prediction layers.
    """
    family, keys = folder_model(folder)
    is_tied, num_layers = keys["logits_via_embedding"], keys["base_num_decoder_layers"]
    shapes = {weight: leaf.shape for weight, leaf in by_path(tree).items()}
    pieces = lay_out(family.tensors, shapes, keys["vocab_size"], str(folder.path))
    on_disk = family.table_names(folder.tensors)
    expected = {piece.file: piece.rearrangement.file_shape for piece in pieces}
    embedding, output = family.file_name("embedding"), family.file_name("output")
    # Some folders store a tied output projection beside the embedding, which is equal.
    passed_over = {*expected, output} if is_tied else set(expected)
    unknown = [name for name in on_disk if name not in passed_over and not family.skips(name)]
    mtp = [name for name in unknown if family.is_mtp_layer(name, num_layers)]
    tensors = {name: folder.tensors[on_disk[name]] for name in expected if name in on_disk}
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{on_disk[name]} is unknown" for name in unknown if name not in mtp]
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            problems.append(f"{on_disk[name]} has shape {list(tensor.shape)}, expected {list(expected[name])}")
        if tensor.dtype == UNREADABLE:
            problems.append(f"{on_disk[name]} has a dtype that is not one of {', '.join(DTYPES)}")
        elif tensor.dtype.itemsize == 1:
            problems.append(f"{on_disk[name]} is stored as {tensor.dtype}, but has no scales")
    has_both = is_tied and {embedding, output} <= on_disk.keys()
    if has_both and not problems and _differ(*(folder.tensors[on_disk[name]] for name in (embedding, output))):
        wanted = "write tie_word_embeddings false in config.json"
        problems.append(f"{on_disk[output]} differs from {on_disk[embedding]}: {wanted}")
    if problems:
        listed = first_few(problems, "\n  ")
        raise UserError(f"the tensors of {folder.path} don't match this model:\n  {listed}")
    notes = [] if notes is None else notes
    if other := len(folder.tensors) - len(on_disk):
        notes.append(f"{folder.path}: {other} tensors of the vision or audio model are left out")
    if mtp:
        notes.append(f"{folder.path}: the {len(mtp)} tensors of extra prediction layers are left out")
    return [(piece, tensors[piece.file]) for piece in pieces]


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    spans = (slice(first, min(first + ROWS, one.shape[0])) for first in range(0, one.shape[0], ROWS))
    rest = tuple(slice(0, size) for size in one.shape[1:])
    return any(not np.array_equal(one.read((span, *rest)), other.read((span, *rest))) for span in spans)


class _PartialArray:
    """One weight while it is read: a buffer on each device of this process, initially zeros."""

    def __init__(self, leaf: jax.ShapeDtypeStruct) -> None:
        self._leaf = leaf
        self._buffers: dict[jax.Device, jax.Array] = {}
        self._holders: dict[tuple[Range, ...], list[jax.Device]] = {}  # the devices that hold each region
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            region = tuple(at.indices(size)[:2] for at, size in zip(index or (), leaf.shape, strict=True))
            self._holders.setdefault(region, []).append(device)
            shape = [stop - start for start, stop in region]
            self._buffers[device] = jnp.zeros(shape, leaf.dtype, device=device)

    def put(self, piece: Piece, tensor: Tensor) -> None:
        """Reads the regions of `piece` that this process's devices need, each once, even if several devices need it."""
        for region, devices in self._holders.items():
            shared = [
                (max(start, first), min(stop, last))
                for (start, stop), (first, last) in zip(region, piece.region(), strict=True)
            ]
            if any(start >= stop for start, stop in shared):
                continue
            block = piece.read(tensor, shared)
            at = [start - first for (start, _), (first, _) in zip(shared, region, strict=True)]
            for device in devices:
                self._buffers[device] = _update(self._buffers[device], jax.device_put(block, device), at)
        # Wait, else blocks would pile up in host memory.
        jax.block_until_ready(list(self._buffers.values()))

    def whole(self) -> jax.Array:
        """Returns the complete weight, after all pieces were put."""
        buffers = list(self._buffers.values())
        return jax.make_array_from_single_device_arrays(self._leaf.shape, self._leaf.sharding, buffers)


@functools.partial(jax.jit, donate_argnums=0)
def _update(buffer: jax.Array, block: jax.Array, at: Sequence[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, block.astype(buffer.dtype), at)


def progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Wraps items in a progress bar on process 0's terminal."""
    silent = jax.process_index() != 0 or not Console(stderr=True).is_terminal
    return track(items, what, console=Console(stderr=True), disable=silent)
