"""Prints where the time of a profiled step goes on a GPU: `python -m scripts.kernel_times RUN_FOLDER [STEPS]`.

The profile is the newest that `profiler=xplane` wrote there, of STEPS steps (`profiler_steps`, 5). The times of all
kernels on the first GPU are summed by kind and by name, per step; two that run at the same time both count. The last
line is the same as JSON. Profiles of other devices are for XProf (docs/profiling.md).
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# What a kernel's name contains, by kind; the first kind that fits counts. XLA's own kernels are named for its fusions.
KINDS = {
    "communication": ("nccl", "ncclDevKernel", "nvshmem"),
    "attention": ("cudnn", "fmha", "flash"),
    "matmuls": ("nvjet", "gemm", "cutlass", "cublas", "xmma"),
    "copies": ("memcpy", "Memcpy", "memset", "Memset", "copy"),
}
OTHER = "everything else"
NAMED = 12  # kernels that are listed by name


def kernels(path: Path) -> Iterator[tuple[str, str, float, float]]:
    """Yields (device, kernel, begin, duration) for each kernel of a profile, in ns."""
    import jax

    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from ((plane.name, event.name, event.start_ns, event.duration_ns) for event in line.events)


def summary(path: Path, steps: int) -> dict[str, Any]:
    """Sums the kernels of `steps` steps on the first GPU, in ms per step: by kind, and for the NAMED slowest by name.

    `step_ms` is the time from the first kernel to the last one, `idle_ms` the part of it in which none runs. Raises
    ValueError if the profile has no kernels of a GPU.
    """
    found = list(kernels(path))
    if not found:
        raise ValueError(f"{path} has no kernels of a GPU")
    first = min(device for device, *_ in found)
    by_name, by_kind = Counter[str](), Counter[str]()
    spans = []
    for device, name, begin, duration in found:
        if device == first:
            by_name[name] += duration / 1e6 / steps
            by_kind[kind_of(name)] += duration / 1e6 / steps
            spans.append((begin, begin + duration))
    return {
        "step_ms": (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e6 / steps,
        "idle_ms": idle(spans) / 1e6 / steps,
        "kinds_ms": dict(by_kind.most_common()),
        "kernels_ms": dict(by_name.most_common(NAMED)),
    }


def kind_of(name: str) -> str:
    """Classifies a kernel by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def idle(spans: Sequence[tuple[float, float]]) -> float:
    """Sums the time between the first and the last kernel in which none runs."""
    total, busy_until = 0.0, None
    for begin, end in sorted(spans):
        if busy_until is not None:
            total += max(0.0, begin - busy_until)
        busy_until = end if busy_until is None else max(busy_until, end)
    return total


def profile_of(path: Path) -> Path:
    """Finds the newest profile in a run's folder, or returns `path` if it is a file; raises ValueError without one."""
    if path.is_file():
        return path
    if not (files := sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)):
        raise ValueError(f"there is no *.xplane.pb in {path}: profiler=xplane writes one")
    return files[-1]


def main(argv: Sequence[str]) -> int:
    """Prints the summary of a run's profile; returns the exit code, 2 for wrong arguments or without a profile."""
    if len(argv) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found = summary(profile_of(Path(argv[0])), int(argv[1]) if len(argv) == 2 else 5)
    except ValueError as error:
        print(f"kernel_times: {error}", file=sys.stderr)
        return 2
    print(f"{found['step_ms']:9.2f} ms per step, of which {found['idle_ms']:.2f} without a kernel")
    for part in ("kinds_ms", "kernels_ms"):
        print()
        for name, milliseconds in found[part].items():
            print(f"{milliseconds:9.2f} ms  {name[:100]}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
