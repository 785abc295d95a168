"""Checkpoints: saved through Orbax while training goes on, checked bit for bit when they are read.

Orbax writes `<directory>/<step>/` with two items: `state`, the arrays under dotted names, and `meta`, a JSON object
of the caller's own values and of each array's shape, dtype and digest. Orbax reads a file with a flipped bit without
noticing, so nothing is handed out here before its digest was compared; docs/checkpoints.md says what is told apart.
"""

import functools
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import quote

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.experimental import multihost_utils

from src.digest import digests
from src.errors import UserError, first_few
from src.model import weights

T = TypeVar("T")
AtomicityMode = ocp.options.AtomicityMode

# Errors after which a checkpoint may well be good: to take them for damage would have it deleted.
NO_ANSWER = (PermissionError, TimeoutError, ConnectionError, MemoryError)
NO_ANSWER_STATUS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")

# Given a checkpoint's meta and its arrays' shapes and dtypes by name: what of it to restore.
AbstractOf = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]

WEIGHTS = ("trainable", "frozen", "stats")  # the parts of a state that another run may start from


class Checkpointer:
    """The checkpoints of one run, in `directory`, a local folder or any other path etils reads.

    Nothing is created or deleted before the first `save`. All processes of a job make the same calls.

    Args:
        directory: its checkpoints/ folder.
        max_to_keep: how many checkpoints stay; -1: all.
        async_save: files are written while the caller goes on.
        compress: files are smaller by a quarter or so; without, arrays in host memory are written as they lie there.
    """

    def __init__(self, directory: epath.PathLike, *, max_to_keep: int, async_save: bool, compress: bool = True) -> None:
        self._directory = absolute(directory)
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=None if max_to_keep == -1 else max_to_keep,
            enable_async_checkpointing=async_save,
            cleanup_tmp_directories=True,
            # Without it Orbax reads the metadata of every checkpoint at its start, and stops at a damaged one.
            lightweight_initialize=True,
            # A store has no rename, so there a file written last marks a whole checkpoint.
            atomicity_options=ocp.options.AtomicityOptions(
                mode=AtomicityMode.COMMIT_FILE if _is_remote(self._directory) else AtomicityMode.ATOMIC_RENAME
            ),
        )
        self._handlers = {"meta": ocp.JsonCheckpointHandler(), "state": ocp.PyTreeCheckpointHandler()}
        if not compress:
            # Nothing is copied, so no array is too large to be written (the default is 96 GB at once).
            self._handlers["state"] = ocp.PyTreeCheckpointHandler(use_compression=False, save_concurrent_gb=10**6)
        self._manager: ocp.CheckpointManager | None = None
        self._damaged_steps: list[int] = []

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Saves a state and its `meta`, any JSON object. The state's arrays may be donated once this returns."""
        arrays = _flatten(state)
        if self._manager is None:
            self._manager = self._open_manager()
        items = {"state": ocp.args.PyTreeSave(arrays), "meta": ocp.args.JsonSave(_encode_meta(meta, arrays))}
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore_latest(
        self, abstract_state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
        """The newest good checkpoint; None where there is no checkpoint at all.

        Damaged ones are passed over, each with a message, and deleted by the next `save`: the run comes to their
        steps again.

        Args:
            abstract_state: the state's parts, as pytrees of `jax.ShapeDtypeStruct`s with shardings.

        Returns:
            state: arrays as `abstract_state` describes them, cast where its dtype is another than the saved one. A
                `data_position` saved in another shape has that shape: the data have changed, and what that means is
                the caller's to say.
            meta: as it was saved.
            messages: what to tell the user; empty where the newest checkpoint was good.

        Raises:
            UserError: no checkpoint is good, or the arrays differ from `abstract_state` in name or shape.
        """
        steps = _steps(self._directory)
        if not steps:
            return None
        _, state, meta, problems = _restore_newest(self._directory, steps, lambda meta, saved: abstract_state)
        self._damaged_steps = list(problems)
        messages = [
            f"checkpoint {damaged} is passed over: {problem}. The next checkpoint saved deletes it."
            for damaged, problem in problems.items()
        ]
        return state, meta, messages

    def wait(self) -> None:
        """Returns when everything saved is whole on the disk or store. Raises what went wrong in the background."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends Orbax's threads."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _open_manager(self) -> ocp.CheckpointManager:
        if jax.process_index() == 0:
            for step in self._damaged_steps:
                (self._directory / str(step)).rmtree()
        self._damaged_steps = []
        # The others may not list the folder before that is done.
        multihost_utils.sync_global_devices("damaged checkpoints deleted")
        return ocp.CheckpointManager(self._directory, options=self._options, item_handlers=self._handlers)


def restore_step(
    path: epath.PathLike, abstract_state: Mapping[str, Any], parts: tuple[str, ...] = WEIGHTS
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Parts of the state of any run's checkpoint: `load_parameters_path`, `load_full_state_path`.

    Args:
        path: a checkpoint's folder; or a run's or its checkpoints/ folder, for the newest good one in it.
        abstract_state: the whole state, part by part, as pytrees of `jax.ShapeDtypeStruct`s with shardings.
        parts: the parts to restore.

    Returns:
        state: a dict of the parts. A `data_position` may have another shape, as in `Checkpointer.restore_latest`.
        meta: as it was saved.
        messages: what to tell the user.

    Raises:
        UserError: there is no checkpoint, none is good, or the arrays of these parts differ in name or shape.
    """
    wanted = {part: abstract_state[part] for part in parts}
    return _restore_of_any_run(path, lambda meta, saved: wanted, ", ".join(parts))


def restore_weights(
    path: epath.PathLike, tree_of: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The weights of any run's checkpoint, whichever part of its state each was in.

    Args:
        path: as `restore_step`'s.
        tree_of: told the checkpoint's meta, and the `shape` and `dtype` of each weight by dotted path, gives what to
            restore: nested dicts of `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        `tree_of`'s nested dicts, of arrays; meta; and what to tell the user.

    Raises:
        UserError: as `restore_step` does.
    """

    def parts_of(meta: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        part_of = {name.partition(".")[2]: part for name in saved if (part := name.partition(".")[0]) in WEIGHTS}
        tree = tree_of(meta, {name: saved[f"{part}.{name}"] for name, part in part_of.items()})
        labels = jax.tree.map_with_path(lambda where, _: part_of.get(_dotted(where), WEIGHTS[0]), tree)
        return {part: weights.select(tree, labels, part) for part in WEIGHTS}

    parts, meta, messages = _restore_of_any_run(path, parts_of, "the weights")
    return weights.join(*parts.values()), meta, messages


def _restore_of_any_run(
    path: epath.PathLike, abstract_of: AbstractOf, what: str
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    folder, steps = _find_steps(path)
    step, state, meta, problems = _restore_newest(folder, steps, abstract_of)
    messages = [f"checkpoint {damaged} of {folder} is passed over: {problem}." for damaged, problem in problems.items()]
    return state, meta, [*messages, f"restored {what} from checkpoint {step} of {folder}."]


def checkpoint_identity(path: epath.PathLike) -> str:
    """A text that another checkpoint's differs from; `path` is `restore_step`'s, whose newest readable one it is of.

    Raises:
        UserError: there is no checkpoint that can be read.
    """
    folder, steps = _find_steps(path)
    for step in steps:
        try:
            meta, saved = _on_all_processes(functools.partial(_read_meta, folder / str(step)))
        except _DamagedError:
            continue
        return f"step {step}, {_checksum({'meta': meta, 'arrays': saved}):08x}"
    raise UserError(f"no checkpoint in {folder} can be read. Give another path.")


def _find_steps(path: epath.PathLike) -> tuple[epath.Path, list[int]]:
    """The folder of checkpoints that `path` means, and the steps there, newest first."""
    path = absolute(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = _steps(folder)
    if not steps and path.name.isdigit() and path.is_dir():
        folder, steps = path.parent, [int(path.name)]
    if not steps:
        raise UserError(
            f"no checkpoint at {path}: expected a run's folder, its checkpoints/ folder, or one step's folder in that"
        )
    return folder, steps


class _DamagedError(Exception):
    """A checkpoint that is not what was saved."""


def _restore_newest(
    folder: epath.Path, steps: list[int], abstract_of: AbstractOf
) -> tuple[int, dict[str, Any], dict[str, Any], dict[int, str]]:
    """(step, state, meta, the problem of each step passed over) of the first of `steps` that is good."""
    problems = {}
    for step in steps:
        try:
            state, meta = _restore(folder / str(step), abstract_of)
        except _DamagedError as error:
            problems[step] = str(error)
        else:
            return step, state, meta, problems
    listed = "\n".join(f"  {step}: {problem}" for step, problem in problems.items())
    raise UserError(
        f"no checkpoint in {folder} can be restored:\n{listed}\n"
        "Nothing was deleted. Give another path, or another run_name to start afresh."
    )


def _restore(step_folder: epath.Path, abstract_of: AbstractOf) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, meta) of one checkpoint. Raises _DamagedError or UserError, on all processes alike."""
    meta, saved = _on_all_processes(lambda: _read_meta(step_folder))
    abstract_state = abstract_of(meta, saved)
    saved = {name: entry for name, entry in saved.items() if name.split(".")[0] in abstract_state}
    wanted = _flatten(abstract_state)
    names = list(wanted)
    position = "data_position"
    if position in wanted.keys() & saved.keys() and list(wanted[position].shape) != saved[position]["shape"]:
        everywhere = jax.sharding.NamedSharding(wanted[position].sharding.mesh, jax.sharding.PartitionSpec())
        wanted[position] = jax.ShapeDtypeStruct(saved[position]["shape"], wanted[position].dtype, sharding=everywhere)
    _check_shapes(step_folder, wanted, saved)

    arrays = _on_all_processes(lambda: _read_arrays(step_folder, wanted, saved))
    found = jax.device_get(digests(arrays))
    changed = [name for name in arrays if found[name] != saved[name]["digest"]]
    if changed:
        raise _DamagedError(f"values differ from those saved, in {first_few(changed)}")

    arrays = {name: _as_wanted(x, wanted[name]) for name, x in arrays.items()}
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays.get(name) for name in names]), meta


def _as_wanted(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype != wanted.dtype:  # nothing is computed in a host's memory
        x = jax.device_put(x, x.sharding.with_memory_kind("device")).astype(wanted.dtype)
    return jax.device_put(x, wanted.sharding)


def _on_all_processes(read: Callable[[], T]) -> T:
    """`read()`, or the same error on every process where it failed on any, so that all turn to the same checkpoint.

    Raises:
        _DamagedError: what is there is not a checkpoint.
        UserError: it could not be looked at, which says nothing of what is there.
    """
    result, problem, denied = None, "", False
    try:
        result = read()
    except Exception as error:  # Damage surfaces as any type, from Orbax, TensorStore, json or the file system.
        problem = f"{type(error).__name__}: {error}".splitlines()[0].partition(" [tensorstore_spec")[0][:300]
        denied = isinstance(error, NO_ANSWER) or any(status in problem for status in NO_ANSWER_STATUS)
    failed, denied = np.atleast_2d(multihost_utils.process_allgather(np.array([problem != "", denied]))).T
    if failed.any():
        problem = problem or f"process {np.flatnonzero(failed)[0]} failed"
        if denied.any():
            raise UserError(f"a checkpoint could not be read: {problem}. Nothing was changed; try again.")
        raise _DamagedError(f"it cannot be read: {problem}")
    return result


def _read_meta(step_folder: epath.Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(the caller's meta, each array's shape, dtype and digest by name), as `_encode_meta` made them."""
    if _is_remote(step_folder) and not (step_folder / "commit_success.txt").exists():
        raise FileNotFoundError("the save did not end")
    content = json.loads((step_folder / "meta" / "metadata").read_text())
    checksum = content.pop("checksum")
    if checksum != _checksum(content):
        raise ValueError("meta/metadata differs from what was saved")
    return content["meta"], content["arrays"]


def _encode_meta(meta: Mapping[str, Any], arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """What is written as the item `meta`."""
    found = jax.device_get(digests(arrays))
    entries = {
        name: {"shape": x.shape, "dtype": x.dtype.name, "digest": int(found[name])} for name, x in arrays.items()
    }
    content = json.loads(json.dumps({"meta": meta, "arrays": entries}))  # As it will be read: tuples become lists.
    return {**content, "checksum": _checksum(content)}


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _read_arrays(
    step_folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], saved: Mapping[str, dict[str, Any]]
) -> dict[str, jax.Array]:
    """The wanted arrays, in the saved dtypes, with the wanted shardings; each process reads what its devices hold.

    This is TensorStore under Orbax's file format, not Orbax: its own `restore` waits for the other processes, which
    hang where one of them finds damage, and leaves reads behind that print tracebacks after the error was handled.
    """
    folder = f"{step_folder}/state/"
    base = quote(folder, safe=":/") if _is_remote(step_folder) else {"driver": "file", "path": folder}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 100_000_000}})  # Of the index that all arrays share.

    def read(name: str) -> jax.Array:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        store = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, context=context).result()
        shape, sharding = wanted[name].shape, wanted[name].sharding
        # Devices that hold the same part share one read, and all parts are read at once.
        indices = {str(index): index for index in sharding.addressable_devices_indices_map(shape).values()}
        shards = {key: store[index].read() for key, index in indices.items()}
        array = jax.make_array_from_callback(
            shape, sharding, lambda index: shards[str(index)].result(), dtype=saved[name]["dtype"]
        )
        return jax.block_until_ready(array)  # else what was read stays in memory beside it

    arrays: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for names in _turns(wanted):
            arrays.update(zip(names, pool.map(read, names), strict=True))
    return {name: arrays[name] for name in wanted}


def _turns(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> list[list[str]]:
    """Names of arrays to be read at once: the largest first, and a turn of several has at most half of its bytes.

    TensorStore holds an array up to three times while it reads it, which so costs most while the least is in memory.
    """
    turns: list[list[str]] = []
    limit, room = max(map(_bytes, wanted.values()), default=0) // 2, 0
    for name in sorted(wanted, key=lambda name: -_bytes(wanted[name])):
        if room < _bytes(wanted[name]):
            turns.append([])
            room = limit
        turns[-1].append(name)
        room -= _bytes(wanted[name])
    return turns


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return x.size * x.dtype.itemsize


def _check_shapes(
    step_folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], saved: Mapping[str, dict[str, Any]]
) -> None:
    """Raises UserError where the arrays of a checkpoint are not those of this run's configuration."""
    here = {name: str(list(x.shape)) for name, x in wanted.items()}
    there = {name: str(entry["shape"]) for name, entry in saved.items()}
    lines = [
        f"{name}: {there.get(name, 'absent')} in the checkpoint, {here.get(name, 'absent')} in the configuration"
        # Weights first: the optimizer's arrays differ only where they do.
        for name in sorted(here.keys() | there.keys(), key=lambda name: (name.startswith("opt."), name))
        if here.get(name) != there.get(name)
    ]
    if lines:
        raise UserError(
            f"the arrays of checkpoint {step_folder} have other shapes than this configuration gives them:\n  "
            + first_few(lines, "\n  ")
            + "\nExpected the model and optimizer it was saved with: give that run's folder as CONFIG, in place of a "
            "YAML file, or as model_name; or another run_name to start afresh."
        )


def _flatten(state: Any) -> dict[str, Any]:
    """The leaves by dotted name, so that what is on disk doesn't depend on the types of optax's containers."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {_dotted(path): leaf for path, leaf in leaves}


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _steps(folder: epath.Path) -> list[int]:
    """The checkpoints in a folder, whole or not, newest first; empty where there is no folder."""
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir())
    # 004 and ² are digits too, but no name of a checkpoint.
    return sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True)


def absolute(path: epath.PathLike) -> epath.Path:
    """The path from the root of the file system; one on an object store is that already."""
    path = epath.Path(path).expanduser()
    return path if _is_remote(path) else path.resolve()


def _is_remote(path: epath.Path) -> bool:
    """Whether the path is on an object store, which has neither rename nor append."""
    return "://" in str(path)


def _is_for_users(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname


# Orbax warns through absl of things nobody using MinText can or need act on.
logging.getLogger("absl").addFilter(_is_for_users)
