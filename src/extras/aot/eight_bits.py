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
    """Compiles a run's step; raises UserError as `check` does."""
    program = traced.jax_traced.lower().compile()
    check(program, traced.plan)
    return program


def check(program: jax.stages.Compiled, plan: StepPlan) -> None:
    """Raises UserError unless the matmuls that a plan quantizes run in 8 bits, both forward and backward.

    If the weight of one of them is frozen, backward ones may be absent. Nothing is checked on CPUs, which never use 8
    bits, or for a program without its text, which some backends lose in the compilation cache: then a line tells the
    user.
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
    """Lists a program's matmuls with `SCOPE` in op_name: op_name, implementation, and whether they run in 8 bits.

    A matmul counts as 8-bit if it is cuBLASLt's call for float8 ($f8) or cuDNN's call for blocked formats
    ($blockScaledDot); if exactly two of its operands are int8, as in a TPU kernel, which also takes scales and group
    offsets; or if it is a convolution of float8 operands, a matmul on a TPU7x. A `dot` of float8 operands does not
    count: on GPUs, Triton computes it within a fusion, as float16.
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
