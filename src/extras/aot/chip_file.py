"""Reads hardware from a YAML file: GPUs and networks that the tables of src/parallel/chips.py lack.

`compile_topology=FILE.yml` names a file, and `compile_topology=NAME` a shipped one, configs/chips/NAME.yml; `:N` after
either takes N GPUs of a host. docs/plan.md lists the keys.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from src import shipped
from src.parallel.chips import GPU_PROPERTIES, Chip, declare_peaks
from src.system.errors import UserError, did_you_mean

FOLDER = shipped("configs") / "chips"
# key -> what it is, and an H100's value
NUMBERS = {
    "devices_per_host": ("GPUs that NVLink or another fast network joins", "8"),
    "memory_bytes": ("bytes", "84_942_979_072"),
    "memory_bandwidth": ("bytes per second", "3350e9"),
    "ici_bandwidth": ("bytes per second that a GPU sends to the others of its host", "450e9"),
    "dcn_bandwidth": ("bytes per second that a GPU sends to other hosts", "50e9"),
}
PLAUSIBLE = 1000  # a value farther from an H100's than this factor is probably in another unit
DTYPES = ("bfloat16", "float32", "tensorfloat32", "fp8", "mxfp8", "int8")
TEXTS = {"kind": "jax.Device.device_kind, such as NVIDIA H100 80GB HBM3", "source": "where the figures are from"}
PEAKS = "a mapping of dtypes to operations per second, such as {bfloat16: 989.4e12, fp8: 1978.9e12}"
COMPILER = "a mapping of the GPU's properties for XLA, such as configs/chips/l40s.yml has"
CAPABILITY = "the compute capability, such as 9.0"


class Hardware(NamedTuple):
    """The hardware in a chip file: a GPU's figures, and the number of GPUs that a host's fast network joins."""

    chip: Chip
    devices_per_host: int


def shipped_names() -> list[str]:
    """Lists the names of the shipped chip files, which `compile_topology` accepts."""
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def find(name: str) -> Path | None:
    """Finds the chip file that `compile_topology=name` means: a path that ends in .yml or .yaml, or a shipped file's.

    A path is not checked to exist; `name` is without `:N`. Returns None if no chip file is meant.
    """
    if name.endswith((".yml", ".yaml")):
        return Path(name)
    return FOLDER / f"{name.lower()}.yml" if name.lower() in shipped_names() else None


def read(path: Path) -> Hardware:
    """Reads a file, and registers its peak rates and compiler properties for this process.

    Raises UserError if there is no such file, if an entry is unknown, missing or wrong, or if a peak rate differs from
    one that is already known for this kind of GPU.
    """
    from src.config.yaml import read_file  # here, because scripts/gke.sh may run where YAML is not installed

    if not path.is_file():
        others = f" The shipped ones: {', '.join(shipped_names())}.{did_you_mean(path.stem, shipped_names())}"
        others += " A file of your own has the keys that docs/plan.md lists."
        raise UserError(f"compile_topology={path}: there is no such file.{others}")
    entries = read_file(path)
    known = (*TEXTS, *NUMBERS, "peaks", "compute_capability", "compiler")
    for key in entries:
        if key not in known:
            raise UserError(f"{path}: {key} is unknown.{did_you_mean(key, known)} Known: {', '.join(known)}")
    texts = {key: _text(entries, key, what, path) for key, what in TEXTS.items()}
    numbers = {key: _number(entries, key, what, path, usual) for key, (what, usual) in NUMBERS.items()}
    capability = str(entries.get("compute_capability", ""))
    if not re.fullmatch(r"\d+\.\d+", capability):
        raise UserError(f"{path}: compute_capability={capability or 'missing'}: expected {CAPABILITY}")
    for key in ("devices_per_host", "memory_bytes"):
        if numbers[key] != int(numbers[key]):
            raise UserError(f"{path}: {key}={entries[key]}: expected a whole number of {NUMBERS[key][0]}")
    declare_peaks(texts["kind"], _peaks(entries, path), str(path))
    if compiler := _compiler(entries, path):
        GPU_PROPERTIES[texts["kind"]] = compiler
    chip = Chip(
        texts["kind"],
        int(numbers["memory_bytes"]),
        numbers["memory_bandwidth"],
        numbers["ici_bandwidth"],
        numbers["dcn_bandwidth"],
        capability,
    )
    return Hardware(chip, int(numbers["devices_per_host"]))


def _text(entries: Mapping[str, Any], key: str, what: str, path: Path) -> str:
    value = entries.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{path}: {key} is {'missing' if value is None else 'not a text'}: {what}")
    return " ".join(value.split())


def _number(entries: Mapping[str, Any], key: str, what: str, path: Path, usual: str = "") -> float:
    """Reads the number of an entry, described by `what`.

    Raises UserError unless it is above 0 and, if `usual` is given, within a factor of `PLAUSIBLE` of `usual`, an H100's
    value: otherwise its unit is probably wrong.
    """
    from src.config.yaml import literal

    value = literal(entries[key]) if isinstance(entries.get(key), str) else None
    what += f", such as {usual}" if usual else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        given = f"={entries[key]}: expected a number above 0" if key in entries else " is missing"
        raise UserError(f"{path}: {key}{given}: {what}")
    if usual and not 1 / PLAUSIBLE < value / float(usual) < PLAUSIBLE:
        times = value / float(usual)
        raise UserError(f"{path}: {key}={entries[key]} is {times:.1g} times an H100's. Is the unit right? {what}")
    return float(value)


def _peaks(entries: Mapping[str, Any], path: Path) -> dict[str, float]:
    peaks = entries.get("peaks")
    if not isinstance(peaks, Mapping) or "bfloat16" not in peaks:
        raise UserError(f"{path}: peaks is missing or has no bfloat16: expected {PEAKS}, for dense matrices")
    if unknown := [dtype for dtype in peaks if dtype not in DTYPES]:
        raise UserError(f"{path}: peaks.{unknown[0]} is unknown. Known: {', '.join(DTYPES)}")
    return {dtype: _number(peaks, dtype, "operations per second, dense", path, "989.4e12") for dtype in peaks}


def _compiler(entries: Mapping[str, Any], path: Path) -> str:
    properties = entries.get("compiler", {})
    if not isinstance(properties, Mapping):
        raise UserError(f"{path}: compiler={properties}: expected {COMPILER}")
    major, _, minor = str(entries["compute_capability"]).partition(".")
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    numbers = {key: _number(properties, key, COMPILER, path) for key in properties}
    words = [f"{key}: {int(number) if number == int(number) else number}" for key, number in numbers.items()]
    return " ".join((*words, capability)) if words else ""
