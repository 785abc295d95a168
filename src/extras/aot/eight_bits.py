"""Checks that a compiled step uses 8-bit matmuls as `quantization` asks: XLA may silently use 16 bits instead."""

import re

import jax

from src.extras.aot.hlo import first_array, parse
from src.model.low_precision import SCOPE
from src.model.params import by_path
from src.step.plan import StepPlan
from src.step.trace import TracedTrainStep
from src.system.errors import UserError, first_few, say


def compiled(traced: TracedTrainStep) -> jax.stages.Compiled:
    """Compiles a run's step; raises UserError if `check` fails."""
    program = traced.jax_traced.lower().compile()
    check(program, traced.plan)
    return program


def check(program: jax.stages.Compiled, plan: StepPlan) -> None:
    """Raises UserError unless the matmuls that a plan quantizes run in 8 bits; CPUs never do and are not checked.

    A program that comes from the compilation cache has no text on some backends, and cannot be checked.
    """
    kind = plan.quantization.kind
    if not kind or plan.layout.platform == "cpu":
        return
    if not (text := program.as_text()):
        say([f"quantization={kind}: the program came from the compilation cache without its text, and was not checked"])
        return
    listed = matmuls(text)
    wide = [f"{name} of {how}" for name, how, is_narrow in listed if not is_narrow]
    is_backward = {"transpose(" in name and "rematted" not in name for name, _, _ in listed}
    wide += [] if False in is_backward else ["every forward one"]
    roles = by_path(plan.roles)
    frozen = any(roles[path] == "frozen" for path in plan.quantization.matmuls)
    wide += [] if True in is_backward or frozen else ["every backward one"]
    if wide:
        narrow = sum(is_narrow for *_, is_narrow in listed)
        raise UserError(
            f"quantization={kind}: the compiled step has {narrow} matmuls in 8 bits, and "
            f"these in more bits: {first_few(wide)}. Check compile_xla_flags, XLA_FLAGS in the environment, and "
            "sizes that are not multiples of 16; quantization_exclude keeps matmuls in dtype"
        )


def matmuls(text: str) -> list[tuple[str, str, bool]]:
    """Lists the matmuls that low_precision.py makes in a program: model line, implementation, and whether in 8 bits.

    cuBLASLt has a call for float8 matmuls, and cuDNN one for blocked formats. On GPUs, Triton computes matmuls within
    fusions, and multiplies float8 as float16. On TPUs, matmuls are convolutions, and a TPU7x computes them in float8. A
    TPU kernel takes two arrays of codes, their scales, and the group offsets.
    """
    result = []
    for computation in parse(text)[0].values():
        for instruction in computation.values():
            attributes = instruction.attributes
            name = re.search(rf'op_name="([^"]*/{SCOPE}/[^"]*)"', attributes)
            target = re.search(
                r'custom_call_target="([^"]*(?:gemm|matmul|blockScaledDot|tpu_custom_call)[^"]*)"', attributes
            )
            if name and (target or instruction.opcode in ("dot", "convolution")):
                dtypes = [first_array(computation[operand].type)[0] for operand in instruction.operands]
                how = target[1] if target else " x ".join(dtypes)
                is_narrow = how.endswith(("$f8", "$blockScaledDot")) or dtypes.count("s8") == 2
                on_tpu = instruction.opcode == "convolution" and all(dtype.startswith("f8") for dtype in dtypes)
                result.append((name[1], how, is_narrow or on_tpu))
    return result
