"""Shrinks a config, runs checks on it, prints a row for each comparison, and writes the rows to the file `report=`."""

import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jaxlib import xla_client

from src import FOLDER
from src.config.schema import Config
from src.config.usage import Usage
from src.config.yaml import dump
from src.extras.command_files import check_outputs
from src.extras.command_words import separate
from src.extras.verify import golden, meshes, report
from src.extras.verify.rewrites import TILE
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, PASS, NotApplicable, Row, first_line, not_applicable
from src.extras.verify.shrink import Shrunk, shrink
from src.extras.verify.subject import LENGTH, LONGER, Context, Subject, optimized
from src.model.attention_kernels import blocked
from src.model.params import STACKED
from src.model.spec import layer_models
from src.run.run_setup import configured
from src.system.errors import UserError, show
from src.system.imports import named

CHECKS = {  # letter: the module of this folder whose `rows` runs the check, and the check's title
    "a": ("meshes", "a mesh computes what one device does"),
    "b": ("derivatives", "gradients are the loss's derivatives"),
    "c": ("rewrites", "micro-batches, remat, tiles, unrolled layers and stages change nothing"),
    "d": ("documents", "documents and later tokens do not leak"),
    "e": ("movement", "trained weights move, frozen ones stay"),
    "f": ("resume", "a resumed run has the bits of one that was not stopped"),
    "g": ("decoding", "cached decoding equals the whole forward pass"),
    "h": ("counts", "parameters and FLOPs are as counted"),
    "i": ("conversion", "to Hugging Face and back keeps all bits"),
    "j": ("program", "the compiled program shards, donates and computes as configured"),
    "k": ("schedules", "learning rates follow the schedule"),
    "l": ("updates", "optimizers update as published"),
    "m": ("evaluation", "evaluations read and average what they should"),
}
DEFAULT = "abdeklm"
OWN = ("mesh", "checks", "report", "golden")
USAGE = Usage(
    f"""Checks a config and the code it runs, shrunk and on virtual devices, before accelerators are rented.

python -m src.verify CONFIG [key=value ...] [checks=abc|all] [mesh=all|as_configured|AXIS=N,...] [report=FILE]
                     [golden=FILE]
{"".join(f"    {letter}  {title}{chr(10)}" for letter, (_, title) in CHECKS.items())}Without checks=: {DEFAULT}."""
)
FAILED = 3  # exit code
NAME = 48  # columns of a line for the name of a row; a longer name moves the rest of its line
# Code that other modules call with their arrays: errors raised in it are reported at the line that calls it.
TOOLS = ("src/parallel/", "src/system/", "src/model/params.py", "src/model/matmul.py", "src/model/low_precision.py")


class Report(NamedTuple):
    """The rows of all checks of the command, including checks that an earlier, interrupted command completed."""

    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 3 if any row failed, otherwise 0."""
        return FAILED * any(row.status == FAIL for row in self.rows)


class Prepared(NamedTuple):
    """A small config, and the meshes on which it is checked."""

    small: Shrunk
    where: list[dict[str, int]]  # meshes on which check `a` runs a step
    compiled: list[dict[str, int]]  # meshes for which check `j` compiles the step


def main(argv: Sequence[str]) -> Report | None:
    """Runs the command line `argv` on virtual CPU devices; returns its report, None for --help.

    Writes the file `report=`, if one is named, after each check. Raises UserError if the config or an argument is
    wrong, the config cannot be shrunk, or the report cannot be written. A check's own errors become rows (`_found`).
    """
    own, words = separate(argv, OWN)
    letters = _letters(own["checks"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", meshes.DEVICES)
    _compile_quickly()
    config = configured(words, USAGE, joins=False)
    if config is None:
        return None
    if own["report"]:
        check_outputs({report.KIND: own["report"]})
    small, where, compiled = prepared(config, own["mesh"], letters)
    if own["golden"]:
        golden.check_file(Path(own["golden"]), small.config)
    for line in small.kept:
        show(f"shrunk      {line}")
    for line in small.hidden:
        show(f"not shown   {line}")
    subject = Subject(small.config, config.step.init_weights_seed)
    context = Context(subject, config, where, compiled, Path(own["golden"]) if own["golden"] else None)
    whole = dump(dict(config))  # of which checks read some keys that the small version lacks
    digest = report.digest_of(small.config, (where, compiled, whole, own["golden"]))
    head = {"model_name": config["model_name"], "digest": digest, "kept": small.kept, "hidden": small.hidden}
    checks = [(letter, *CHECKS[letter]) for letter in letters]
    checks += [("golden", "golden", "the bits of a few steps")] * bool(own["golden"])
    begun, rows = time.monotonic(), list[Row]()
    unfinished, before = [letter for letter, *_ in checks], report.finished(own["report"], digest)
    try:
        for letter, module, title in checks:
            show(f"{letter}  {title}{' (completed before an interruption)' * (letter in before)}")
            try:
                for row in before.get(letter) or _found(context, letter, module):
                    rows.append(row)
                    show(_line(row))
                unfinished.remove(letter)
            except MemoryError as error:
                rows.append(Row(module, FAIL, note=f"memory is full: {first_line(error)}", check=letter))
                show(_line(rows[-1]))
            finally:
                report.write(own["report"], head, rows, unfinished)
    except KeyboardInterrupt:
        again = "; the same command continues with the others" if own["report"] and digest else ""
        show(f"interrupted: the checks above were completed{again}")
        raise
    counts = {status: sum(row.status == status for row in rows) for status in (PASS, FAIL, NOT_APPLICABLE)}
    listed = ", ".join(f"{count} {status}" for status, count in counts.items())
    show(f"{listed}; {time.monotonic() - begun:.0f} s")
    return Report(rows)


def _compile_quickly() -> None:
    """Makes XLA use its older emitter of fused loops for CPUs, which compiles small programs in half the time.

    XLA reads its flags once, so this has no effect after JAX has started; an XLA without that emitter ignores the flag.
    If XLA_FLAGS has --xla_backend_extra_options already, nothing changes.
    """
    typed, flag = os.environ.get("XLA_FLAGS", ""), "--xla_backend_extra_options"
    if flag not in typed:  # a second one would replace the user's
        with mock.patch.dict(os.environ, XLA_FLAGS=f"{typed} {flag}=xla_cpu_disable_new_fusion_emitters"):
            xla_client.CompileOptions()  # makes XLA read its flags


def prepared(config: Config, mesh: str, letters: str) -> Prepared:
    """Shrinks a config, and chooses the meshes of checks `a` and `j` by `mesh`, the value of `mesh=`.

    If `letters` has `a` or `j`, that check's meshes can shard the small sizes if they can shard the config's own.
    Raises UserError like `shrink` and `meshes.chosen`.
    """
    has_chunks = any(layer.attention_type == "gated_delta" for layer, _ in layer_models(config.model))
    length = LONGER if has_chunks else LENGTH
    small = shrink(config, length)
    where = meshes.chosen(mesh, small.config, config.mesh)
    compiled = where if "=" in mesh else meshes.compiled(small.config, config.mesh)
    used = [*(where if "a" in letters else []), *(compiled if "j" in letters else [])]
    return Prepared(shrink(config, length, used), where, compiled)


def _found(context: Context, letter: str, module: str) -> Iterator[Row]:
    """Yields a check's rows; if it raises, the last row has the error: NOT APPLICABLE for NotApplicable, else FAIL.

    Raises MemoryError if memory is full, also if JAX reports that.
    """
    checked = _checked(nnx.Variable.__init__, context.whole.mesh.logical_axis_rules)
    try:
        # Compiling takes most of the time, and optimizations change only rounding. `j` reads the optimized program.
        declares, tiled = mock.patch.object(nnx.Variable, "__init__", checked), mock.patch.dict(blocked.TILE, cpu=TILE)
        with optimized(letter == "j"), declares, tiled:
            for row in named(f"src.extras.verify.{module}:rows")(context):
                yield row._replace(check=letter)
    except NotApplicable as error:
        yield not_applicable(module, error)._replace(check=letter)
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED"):
            raise MemoryError(first_line(error)) from error
        yield Row(module, FAIL, note=_described(error), check=letter)


def _checked(declare: Callable[..., None], rules: Mapping[str, Sequence[str]]) -> Callable[..., None]:
    """Wraps `declare`, the constructor of weights, to check the logical axes that a weight names.

    The wrapper raises ValueError for an axis that is not in `rules` or STACKED, or if there is not one per dim. Its
    error comes from the line that declares the weight; JAX's later ones would not.
    """

    def declare_checked(self: nnx.Variable, value: Any, *rest: Any, **facts: Any) -> None:
        axes, known = facts.get("out_sharding") or (), [None, *STACKED, *rules]
        if unknown := [axis for axis in axes if axis not in known]:
            raise ValueError(f"no logical axis is called {unknown[0]}; logical_axis_rules has {', '.join(rules)}")
        if axes and len(axes) != np.ndim(value):
            raise ValueError(f"{len(axes)} logical axes ({', '.join(map(str, axes))}) of {np.ndim(value)} dims")
        declare(self, value, *rest, **facts)

    return declare_checked


def _line(row: Row) -> str:
    """Formats a row for the terminal; if it has no figure, the note is in the figure's place."""
    if row.figure is None:
        figure = ""
    elif row.bound is None:
        figure = f"{row.figure:.1e}"
    elif not row.bound:  # bound 0: the figure counts wrong things
        figure = f"{row.figure:,.0f}"
    else:
        figure = f"{row.figure:.1e} {'<=' if row.figure <= row.bound else '>'} {row.bound:.0e}"
    return f"   {row.status:14} {row.name:{NAME}} {figure and f'{figure:18}'}{row.note}".rstrip()


def _described(error: Exception) -> str:
    """Describes an error by its type, unless it is a UserError, its message's first line, and its `_edited_line`."""
    if isinstance(error, UserError) and error.__cause__:  # raised for a user's function; the message names its line
        return first_line(error)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{kind}{first_line(error)}, {_edited_line(error)}"


def _edited_line(error: BaseException) -> str:
    """Formats the innermost frame of the traceback in code that may have been edited, as `file:line: code`.

    That excludes installed packages, this folder and TOOLS. If no frame is left, only installed packages are excluded,
    and then none.
    """
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.prefix)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(installed)]
    own = (str(Path(__file__).parent), *(str(FOLDER.parent / tool) for tool in TOOLS))
    edited = [frame for frame in frames if not frame.filename.startswith(own)]
    frame = (edited or frames or traceback.extract_tb(error.__traceback__))[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def _letters(text: str) -> str:
    """Reads `checks=`, letters with or without commas: DEFAULT if it is empty, every letter for `all`.

    Raises UserError for an unknown letter, or if there are only commas.
    """
    if text in ("", "all"):
        return DEFAULT if not text else "".join(CHECKS)
    letters = "".join(dict.fromkeys(text.replace(",", "")))
    if unknown := [letter for letter in letters if letter not in CHECKS] or [""] * (not letters):
        raise UserError(f"checks={text}: unknown check {unknown[0]}; expected all, or letters of {''.join(CHECKS)}")
    return letters
