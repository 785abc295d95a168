"""Restores checkpoints: the newest good one of this run, or weights and states from any run.

Orbax does not notice a flipped bit in a file, so the digest of every array is compared before it is returned.
docs/checkpoints.md lists the kinds of failures that are distinguished.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import quote

import jax
import numpy as np
import tensorstore as ts
from etils import epath

from src.checkpoint.agreement import of_process_0, on_all_processes
from src.checkpoint.digest import digests
from src.checkpoint.format import HostArray, Restored, checksum_of, flatten, read_evaluations
from src.checkpoint.run_folder import absolute, is_remote, is_unfinished, steps_in
from src.data.processes import check_same
from src.model import params
from src.system.errors import UserError, first_few
from src.system.json_text import parse_json
from src.system.storage_errors import DamagedError, tensorstore_result

T = TypeVar("T")

# Chooses the arrays to restore, given a checkpoint's meta, and the shape and dtype of its arrays by dotted name.
AbstractOf = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]

Wanted = Mapping[str, jax.ShapeDtypeStruct]  # arrays by dotted name
Saved = Mapping[str, dict[str, Any]]  # the shape, dtype and digest of each array, by dotted name

ENTRIES = {False: params.ROLES, True: ("ema", *params.ROLES[1:])}  # a checkpoint's entries of weights, by `load_ema`


def restore_weights(path: epath.PathLike, wanted_of: AbstractOf, ema: bool = False, some: str = "") -> Restored:
    """Restores weights of any run's checkpoint, as `restore_any` does, whether the run trained or froze them.

    Dotted names, here and in `wanted_of`, omit the entry (`trainable`, `frozen`, ...). With `ema`, trained weights are
    replaced by their moving averages; a run without these raises UserError. `some` describes the wanted weights in
    messages if they are only a part; if it is empty, weights of the run that `wanted_of` omits also raise UserError.
    """
    entries = ENTRIES[ema]

    def by_entry(meta: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        entry_of = {name.partition(".")[2]: entry for name in saved if (entry := name.partition(".")[0]) in entries}
        if ema and "ema" not in entry_of.values():
            raise UserError(f"load_ema: {path} has no average of its weights: that run was made without ema_decay")
        wanted = wanted_of(meta, {name: saved[f"{entry}.{name}"] for name, entry in entry_of.items()})
        named = {f"{entry_of.get(name, entries[0])}.{name}": leaf for name, leaf in wanted.items()}
        # `restore` compares the names of all arrays in an entry that is a key here.
        return named if some else dict.fromkeys(entries) | named

    what = some or ("the average of the weights" if ema else "the weights")
    restored, meta, messages = restore_any(path, by_entry, what)
    weights = {name.partition(".")[2]: array for name, array in restored.items() if array is not None}
    return Restored(weights, meta, messages)


def restore_any(path: epath.PathLike, abstract_of: AbstractOf, what: str) -> Restored:
    """Restores parts of the state in any run's checkpoint, or single arrays by their dotted names.

    `path` is a checkpoint's folder, or the folder of a run or its checkpoints/ folder, in which the newest good one is
    taken. The parts are pytrees of `jax.ShapeDtypeStruct`s with shardings and of `HostArray`s; `what` describes them in
    messages. Raises UserError if no checkpoint exists, all are damaged, one could not be read, or the arrays of these
    parts differ in name or shape; TransientError if one could not be read after several attempts.
    """
    folder, steps = find_steps(path)
    step, (state, meta), problems = first_good(folder, steps, lambda place: restore(place, abstract_of))
    messages = [f"checkpoint {damaged} of {folder} is passed over: {problem}." for damaged, problem in problems.items()]
    return Restored(state, meta, [*messages, f"restored {what} from checkpoint {step} of {folder}."])


def newest_meta(path: epath.PathLike) -> tuple[dict[str, Any], str]:
    """Reads the meta of the newest readable checkpoint at `path`, and makes a string that identifies the checkpoint.

    Raises as `restore_any` does.
    """
    step, (meta, saved), _ = first_good(*find_steps(path), _read_meta)
    return meta, f"step {step}, {checksum_of({'meta': meta, 'arrays': saved}):08x}"


def find_steps(path: epath.PathLike) -> tuple[epath.Path, list[int]]:
    """Finds the folder of checkpoints that `path` means, and its steps, newest first; without any, raises UserError."""
    path = absolute(path)

    def find() -> tuple[str, list[int]]:
        for kind, folder in (("run", path / "checkpoints"), ("checkpoints", path)):
            if steps := steps_in(folder):
                return kind, steps
        return "step", [int(path.name)] if path.name.isdecimal() and path.is_dir() else []

    kind, steps = of_process_0(find)
    folder = {"run": path / "checkpoints", "checkpoints": path, "step": path.parent}[kind]
    if not steps:
        others = first_few(map(str, steps_in(path.parent)))
        raise UserError(
            f"no checkpoint at {path}: expected a run's folder, its checkpoints/ folder, or one step's folder in that"
            + f". There are {others} in {path.parent}" * bool(others)
        )
    return folder, steps


def first_good(folder: epath.Path, steps: list[int], read: Callable[[epath.Path], T]) -> tuple[int, T, dict[int, str]]:
    """Reads the first undamaged one of `steps`; returns the step, the result, and the problems of earlier steps.

    Raises UserError if all are damaged, or if only some processes see one; also as `on_all_processes` and `read` do,
    except for DamagedError.
    """
    problems = {}
    for step in steps:
        place, needed = folder / str(step), "the same folder; a network disk may show new files late"
        check_same({"a checkpoint": str(on_all_processes(place.is_dir))}, f"contents in {place}", needed)
        try:
            return step, read(place), problems
        except DamagedError as error:
            problems[step] = str(error)
    listed = "\n".join(f"  {step}: {problem}" for step, problem in problems.items())
    raise UserError(
        f"no checkpoint in {folder} can be restored:\n{listed}\n"
        "Nothing was deleted. Give another path, or another run_name to start afresh."
    )


def restore(step_folder: epath.Path, abstract_of: AbstractOf) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restores (state, meta) of one checkpoint, with the state in the structure that `abstract_of` returns.

    If that has `data_position`, meta also has the checkpoint's `checksum` and the results of its evaluation, if any.
    Raises DamagedError, UserError or TransientError, the same on all processes.
    """
    meta, saved = _read_meta(step_folder)
    abstract_state = abstract_of(meta, saved)
    if "data_position" in abstract_state:  # a run resumes from this checkpoint
        meta["checksum"] = checksum_of({"meta": meta, "arrays": saved})
        meta |= of_process_0(lambda: read_evaluations(step_folder.parent).get(str(meta["checksum"]), {}))
    saved = {name: entry for name, entry in saved.items() if {name, name.split(".")[0]} & set(abstract_state)}
    wanted = flatten(abstract_state)
    host_arrays = [name for name, x in wanted.items() if isinstance(x, HostArray)]
    for name in saved.keys() & set(host_arrays):
        wanted[name] = jax.ShapeDtypeStruct(saved[name]["shape"], saved[name]["dtype"], sharding=wanted[name].sharding)
    _check_shapes(step_folder, wanted, saved)

    arrays: dict[str, Any] = on_all_processes(lambda: _read_arrays(step_folder, wanted, saved))
    digest_of = jax.device_get(digests(arrays))
    if changed := [name for name in arrays if digest_of[name] != saved[name]["digest"]]:
        raise DamagedError(f"values differ from those saved, in {first_few(changed)}")
    # A checkpoint under a wrong name would prevent the save of that step.
    if (held := int(arrays.get("step", step_folder.name))) != int(step_folder.name):
        raise DamagedError(f"it is the checkpoint of step {held} under another name")
    for name, x in arrays.items():
        if x.dtype != wanted[name].dtype:  # casting requires device memory
            x = jax.device_put(x, x.sharding.with_memory_kind("device")).astype(wanted[name].dtype)
        x = jax.device_put(x, wanted[name].sharding)
        arrays[name] = np.asarray(x) if name in host_arrays else x
    return jax.tree.unflatten(jax.tree.structure(abstract_state), arrays.values()), meta


def _read_meta(step_folder: epath.Path) -> tuple[dict[str, Any], Saved]:
    def read() -> dict[str, Any]:
        if is_unfinished(step_folder):
            raise DamagedError("the save did not finish")
        try:
            content = parse_json((step_folder / "meta" / "metadata").read_bytes())
        except ValueError as error:
            raise DamagedError(f"meta/metadata is {error}") from error
        if not isinstance(content, dict) or content.pop("checksum", None) != checksum_of(content):
            raise DamagedError("meta/metadata differs from what was saved")
        return content

    content = on_all_processes(read)
    # The meta has a digest of each array, so equal checksums mean equal weights.
    check_same({"checksum of meta": checksum_of(content)}, f"contents in {step_folder}", "the same folder")
    return content["meta"], content["arrays"]


def _read_arrays(step_folder: epath.Path, wanted: Wanted, saved: Saved) -> dict[str, jax.Array]:
    """Reads the wanted arrays, in the saved dtypes, with the wanted shardings; each process reads its devices' shards.

    This reads Orbax's format with TensorStore, because Orbax's own `restore` makes the other processes hang if one of
    them finds damage, and leaves reads behind that print tracebacks after the error was handled.
    """
    folder = f"{step_folder}/state/"
    base = quote(folder, safe=":/") if is_remote(step_folder) else {"driver": "file", "path": folder}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 100_000_000}})  # for the index shared by all arrays

    def read(name: str) -> jax.Array:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        store = tensorstore_result(ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, context=context))
        shape, sharding = wanted[name].shape, wanted[name].sharding
        # One read for all devices that hold the same shard; all shards are read at once.
        indices = {str(index): index for index in sharding.addressable_devices_indices_map(shape).values()}
        shards = {key: store[index].read() for key, index in indices.items()}
        array = jax.make_array_from_callback(
            shape, sharding, lambda index: tensorstore_result(shards[str(index)]), dtype=saved[name]["dtype"]
        )
        return jax.block_until_ready(array)  # otherwise the read buffers stay in memory too

    # TensorStore holds up to three copies of an array while reading it, so the largest array is read first, while
    # memory is still empty, and then groups of arrays with at most half of its bytes.
    size = {name: x.size * x.dtype.itemsize for name, x in wanted.items()}
    groups: list[list[str]] = []
    room = 0
    for name in sorted(wanted, key=lambda name: -size[name]):
        if room < size[name]:
            groups.append([])
            room = max(size.values()) // 2
        groups[-1].append(name)
        room -= size[name]
    arrays: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for names in groups:
            arrays.update(zip(names, pool.map(read, names), strict=True))
    return {name: arrays[name] for name in wanted}


def _check_shapes(step_folder: epath.Path, wanted: Wanted, saved: Saved) -> None:
    configured = {name: str(list(x.shape)) for name, x in wanted.items()}
    stored = {name: str(entry["shape"]) for name, entry in saved.items()}
    lacking = {name.partition(".")[0] for name in configured} - {name.partition(".")[0] for name in stored}
    for entry, off in (("ema", "ema_decay=0"), ("spikes", "skip_step_on_spikes=false")):
        if entry in lacking:
            raise UserError(
                f"checkpoint {step_folder} was saved by a run with {off} and lacks arrays that this run needs to "
                f"continue: set {off}, or start another run from its weights with load_parameters_path"
            )
    lines = [
        f"{name}: {stored.get(name, 'absent')} in the checkpoint, {configured.get(name, 'absent')} in the configuration"
        # Weights first: the optimizer's arrays differ only if the weights do.
        for name in sorted(configured.keys() | stored.keys(), key=lambda name: (name.startswith("opt."), name))
        if configured.get(name) != stored.get(name)
    ]
    if lines:
        raise UserError(
            f"the arrays of checkpoint {step_folder} do not match this configuration:\n  "
            + first_few(lines, "\n  ")
            + "\nExpected the model and optimizer of the checkpoint: give that run's folder as CONFIG, instead of a "
            "YAML file, or as model_name; or another run_name to start afresh."
        )
