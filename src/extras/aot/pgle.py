"""Profile-guided latency estimation (PGLE): measured kernel times for XLA's GPU scheduler (docs/profiling.md).

By default the scheduler estimates latencies. PGLE measures them in a run: `pgle=collect` writes a profile, and
`pgle_profile` compiles with it; with `pgle=auto` JAX does both in one run. XLA silently ignores a profile that it
cannot read or that belongs to another program, so the file also describes its program, and a mismatch is an error.
"""

import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import jax
from etils import epath
from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet
from jax._src import config as jax_config
from jax._src.pjit import _pgle_profiler_dict as jax_profilers
from jax.experimental.profiler import get_profiled_instructions_proto

from src.config.command_keys import Aot
from src.extras.aot import eight_bits
from src.extras.aot.program import FileKind, Header, load, read_file, write_file
from src.step.trace import TracedTrainStep
from src.system.errors import UserError, say

PROFILE_FILE = FileKind("pgle_profile", b"MinText PGLE profile, format 1\n", "src.train pgle=collect", "collected")
EMPTY = (
    "the profile of the step is empty. Probably another profiler uses the GPU's counters (CUPTI allows one at a time): "
    "Nsight Systems, a cluster monitor such as DCGM, or another profiling process. Stop it, or set pgle to "
    'empty ("")'
)
PGLE_STEPS = 3  # number of profiled steps, after the first one, which loads kernels and sets up communication
Step = Callable  # called with (state, batch, hparams), as `train_step` is


def chosen_step(keys: Aot, traced: TracedTrainStep, header: Header, folder: epath.Path, exits: ExitStack) -> Step:
    """Returns the run's step: loaded from `compiled_trainstep_file`, or compiled as `pgle` and `pgle_profile` say.

    With `pgle=auto`, JAX compiles it in its first calls. With `pgle=collect`, it writes a profile into the run's
    `folder`, and `exits` ends an incomplete one. Raises UserError if both a step and a profile are given, if a file
    cannot be read or belongs to another program than `header` describes, if the compiled program has too few of a
    profile's instructions, if PGLE is requested on another platform than GPU, or if a matmul that `quantization`
    selects has more than 8 bits.
    """
    if keys.compiled_trainstep_file and keys.pgle_profile:
        raise UserError(
            f"pgle_profile={keys.pgle_profile}: the step in compiled_trainstep_file is already compiled. Give "
            "src.train_compile the profile, and src.train only the step"
        )
    if keys.compiled_trainstep_file:
        return load(keys.compiled_trainstep_file, header, traced)
    check_platform(keys, traced.plan.layout.platform)
    if keys.pgle == "auto":
        # JAX compiles internally, out of our reach: check a separate compilation of the same matmuls.
        if traced.plan.quantization.kind:
            eight_bits.compiled(traced)
        return _automatic(traced.train)
    lowered = traced.jax_traced.lower()
    if keys.pgle == "collect":
        path = folder / "pgle" / f"{hashlib.sha256(json.dumps(header).encode()).hexdigest()[:16]}.profile"
        collector = _Collector(lowered, header, path)
        eight_bits.check(collector.program, traced.plan)
        exits.callback(collector.close)
        return collector
    option = options(keys.pgle_profile, header)
    compiled = lowered.compile(option)
    check_used(keys.pgle_profile, option, compiled.as_text() or "")
    eight_bits.check(compiled, traced.plan)
    return compiled


def check_platform(keys: Aot, platform: str) -> None:
    """Raises UserError if PGLE is requested on a platform other than GPU."""
    for key, value in (("pgle", keys.pgle), ("pgle_profile", keys.pgle_profile)):
        if value and platform != "gpu":
            raise UserError(f"{key}={value} needs an NVIDIA GPU, but the platform is {platform}: leave {key} empty")


def options(path: str, header: Header) -> dict[str, bytes]:
    """Builds the compiler option for the profile at `path`; raises UserError as `read_file` does."""
    return {"fdo_profile": read_file(PROFILE_FILE, path, header)}


def check_used(path: str, option: Mapping[str, bytes], text: str) -> None:
    """Reports how many of a profile's instructions the compiled `text` has; raises UserError if fewer than half."""
    names = set(profiled(option["fdo_profile"]))
    # The profiler prefixes names with a digest of the program before scheduling; XLA ignores names with another digest.
    digest = re.search(r'fingerprint_before_lhs="(\w+)"', text)
    instructions = {name.removeprefix(f"{digest[1]}::") for name in names} if digest else names
    used = sum(f"%{name} = " in text for name in instructions)
    if used < len(names) / 2:
        raise UserError(
            f"pgle_profile={path} has times for {len(names):,} instructions, of which {used:,} are in this "
            "program: XLA compiled the step differently. Collect the profile on the machines that use it"
        )
    say([f"compiled with the profile {path}: {used:,} of its {len(names):,} instructions are in the program"])


def profiled(profile: bytes) -> Iterator[str]:
    """Yields the names of the instructions timed in a ProfiledInstructionsProto, `NAME` or `DIGEST::NAME`."""
    for entry in _fields(profile):
        if entry.field_number == 1:
            yield from (field.data.decode() for field in _fields(entry.data) if field.field_number == 1)


def _fields(message: bytes) -> UnknownFieldSet:
    """Parses the fields of a protocol buffer message without its declaration."""
    return UnknownFieldSet(empty_pb2.Empty.FromString(message))


def _automatic(train_step: Step) -> Step:
    """Wraps the step so that JAX profiles its first calls, then compiles it again with the measured times.

    The wrapped step raises UserError if the profile is empty.
    """
    messages: list[str] = []

    def step(*arguments):  # noqa: ANN002, ANN202
        with jax_config.enable_pgle(True), warnings.catch_warnings():
            warnings.filterwarnings("error", "PGLE collected an empty trace", RuntimeWarning)
            try:
                result = train_step(*arguments)
            except RuntimeWarning:
                raise UserError(f"pgle=auto: {EMPTY}") from None
        for profiler in () if messages else jax_profilers.values():  # only one function is called under PGLE
            if (profile := profiler.collected_fdo) is not None:
                messages.append(
                    f"pgle=auto: compiled again with times for {len(set(profiled(profile))):,} instructions"
                )
            elif not profiler.is_enabled():
                messages.append("pgle=auto: jax_cache_dir has the step, compiled with an earlier run's profile")
            say(messages)
        return result

    return step


class _Collector:
    """A compiled step; process 0 profiles `PGLE_STEPS` of its calls, after the first, and writes the profile to `path`.

    It is compiled without command buffers, which would hide kernels from the profiler. The last profiled call raises
    UserError if the profile is empty or can't be written.
    """

    def __init__(self, lowered: jax.stages.Lowered, header: Header, path: epath.Path) -> None:
        self.program = lowered.compile({"xla_gpu_enable_command_buffer": ""})
        self._header, self._path = header, path
        self._calls = 0
        self._traced = tempfile.TemporaryDirectory(prefix="mintext-pgle-")

    def __call__(self, *arguments):  # noqa: ANN002, ANN204
        if self._calls == 1 and jax.process_index() == 0:
            jax.block_until_ready(arguments)
            jax.profiler.start_trace(self._traced.name)
        result = self.program(*arguments)
        self._calls += 1
        if self._calls == 1 + PGLE_STEPS and jax.process_index() == 0:
            jax.block_until_ready(result)
            jax.profiler.stop_trace()
            self._write()
        return result

    def close(self) -> None:
        """Ends a profile that is incomplete because the run ended early, and reports that no profile was written."""
        if 0 < self._calls <= PGLE_STEPS:
            if self._calls > 1 and jax.process_index() == 0:
                jax.profiler.stop_trace()
            say([f"pgle=collect wrote no profile: it needs {1 + PGLE_STEPS} steps, and this start ran {self._calls}"])

    def _write(self) -> None:
        (session,) = (Path(self._traced.name) / "plugins" / "profile").iterdir()
        profile = get_profiled_instructions_proto(str(session))
        self._traced.cleanup()
        if not set(profiled(profile)):
            raise UserError(f"pgle=collect: {EMPTY}")
        write_file(PROFILE_FILE, str(self._path), self._header, profile)
        say([f"wrote a profile of {PGLE_STEPS} steps: compile with it by pgle_profile={self._path}"])
