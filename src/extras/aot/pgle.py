"""Profiles by which XLA's scheduler for GPUs knows how long kernels and collectives take (docs/profiling.md).

The scheduler estimates that by itself. Profile-guided latency estimation (PGLE) measures it in a run: `pgle=collect`
writes a profile, by which `pgle_profile` compiles; `pgle=auto` has JAX do both in one run. XLA takes no notice of a
profile that it cannot read or that is of another program, and says nothing, so a file names the program that it is of.
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
from src.step.build import TracedStep
from src.system.errors import UserError, say

PROFILE_FILE = FileKind("pgle_profile", b"MinText PGLE profile, format 1\n", "src.train pgle=collect", "collected")
EMPTY = (
    "the profile of the step is empty. Likely another profiler has the GPU's counters (CUPTI takes one at a time): "
    "Nsight Systems, a monitor of the cluster such as DCGM, or another process that profiles. End it, or set pgle to "
    'empty ("")'
)
PGLE_STEPS = 3  # that are profiled, after the first, which loads kernels and sets up communication
Step = Callable  # of (state, batch, hparams), as `train_step`


def chosen_step(keys: Aot, built: TracedStep, header: Header, folder: epath.Path, exits: ExitStack) -> Step:
    """Returns the run's step: loaded from a file, or compiled here as `pgle` and `pgle_profile` say.

    `folder` is the run's; `exits` takes what is to be closed at its end. Raises UserError if a file is not of the
    program of `header`, PGLE asked for elsewhere than on a GPU, or a product wider than `quantization` says.
    """
    if keys.compiled_trainstep_file and keys.pgle_profile:
        raise UserError(
            f"pgle_profile={keys.pgle_profile}: the step of compiled_trainstep_file is compiled already. Give "
            "src.train_compile the profile, and src.train the step alone"
        )
    if keys.compiled_trainstep_file:
        return load(keys.compiled_trainstep_file, header, built)
    check_platform(keys, built.plan.layout.platform)
    if keys.pgle == "auto":
        if built.plan.quantization.kind:  # JAX compiles where no one can look, but the same products
            eight_bits.compiled(built)
        return _automatic(built.train)
    lowered = built.traced.lower()
    if keys.pgle == "collect":
        path = folder / "pgle" / f"{hashlib.sha256(json.dumps(header).encode()).hexdigest()[:16]}.profile"
        collector = _Collector(lowered, header, path)
        eight_bits.check(collector.program, built.plan)
        exits.callback(collector.close)
        return collector
    option = options(keys.pgle_profile, header)
    compiled = lowered.compile(option)
    check_used(keys.pgle_profile, option, compiled.as_text())
    eight_bits.check(compiled, built.plan)
    return compiled


def check_platform(keys: Aot, platform: str) -> None:
    """Raises UserError if PGLE is asked for on another platform than a GPU."""
    for key, value in (("pgle", keys.pgle), ("pgle_profile", keys.pgle_profile)):
        if value and platform != "gpu":
            raise UserError(f"{key}={value} is for NVIDIA GPUs, and this is {platform}: leave {key} empty")


def options(path: str, header: Header) -> dict[str, bytes]:
    """Returns the compiler's option for the profile at `path`; raises UserError if it is not of this program."""
    return {"fdo_profile": read_file(PROFILE_FILE, path, header)}


def check_used(path: str, option: Mapping[str, bytes], text: str) -> None:
    """Raises UserError if `text`, compiled with `options` of `path`, has few of the instructions that have times."""
    names = set(profiled(option["fdo_profile"]))
    # The profiler writes the program's digest from before its schedule in front of a name; XLA takes no other's.
    digest = re.search(r'fingerprint_before_lhs="(\w+)"', text)
    instructions = {name.removeprefix(f"{digest[1]}::") for name in names} if digest else names
    used = sum(f"%{name} = " in text for name in instructions)
    if used < len(names) / 2:
        raise UserError(
            f"pgle_profile={path} has times of {len(names):,} instructions, of which {used:,} are in this "
            "program: XLA made another of the same step. Collect the profile where it is used"
        )
    say([f"compiled by the profile {path}: {used:,} of its {len(names):,} instructions are in the program"])


def profiled(profile: bytes) -> Iterator[str]:
    """Yields the instructions that a ProfiledInstructionsProto has times of, `NAME` or `DIGEST::NAME`."""
    for entry in _fields(profile):
        if entry.field_number == 1:
            yield from (field.data.decode() for field in _fields(entry.data) if field.field_number == 1)


def _fields(message: bytes) -> UnknownFieldSet:
    """Returns the fields of a protocol buffer whose declaration is not here."""
    return UnknownFieldSet(empty_pb2.Empty.FromString(message))


def _automatic(train_step: Step) -> Step:
    """Returns the step as JAX profiles it in its first calls, and then compiles it again by what it measured."""
    messages: list[str] = []

    def step(*arguments):  # noqa: ANN002, ANN202
        with jax_config.enable_pgle(True), warnings.catch_warnings():
            warnings.filterwarnings("error", "PGLE collected an empty trace", RuntimeWarning)
            try:
                result = train_step(*arguments)
            except RuntimeWarning:
                raise UserError(f"pgle=auto: {EMPTY}") from None
        for profiler in () if messages else jax_profilers.values():  # of the one function that is called under PGLE
            if (profile := profiler.collected_fdo) is not None:
                messages.append(f"pgle=auto: compiled again by times of {len(set(profiled(profile))):,} instructions")
            elif not profiler.is_enabled():
                messages.append("pgle=auto: jax_cache_dir has the step, compiled by an earlier run's profile")
            say(messages)
        return result

    return step


class _Collector:
    """A step without command buffers, which hide kernels from the profiler; process 0 profiles some of its calls."""

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
        """Ends a profile whose steps have not been made, of a run that goes on near its end or was stopped."""
        if 0 < self._calls <= PGLE_STEPS:
            if self._calls > 1 and jax.process_index() == 0:
                jax.profiler.stop_trace()
            say([f"pgle=collect wrote no profile: it takes {1 + PGLE_STEPS} steps, this start made {self._calls}"])

    def _write(self) -> None:
        (session,) = (Path(self._traced.name) / "plugins" / "profile").iterdir()
        profile = get_profiled_instructions_proto(str(session))
        self._traced.cleanup()
        if not set(profiled(profile)):
            raise UserError(f"pgle=collect: {EMPTY}")
        write_file(PROFILE_FILE, str(self._path), self._header, profile)
        say([f"a profile of {PGLE_STEPS} steps is written: compile by it with pgle_profile={self._path}"])
