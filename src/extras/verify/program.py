"""Check j: the step compiled for a mesh of virtual devices: copies, donation, dtypes, what devices exchange."""

import itertools
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence

import jax

from src.extras.verify.counts import matmuls, traced_step
from src.extras.verify.meshes import is_own
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, Row, first_line, mesh_name, none_of, not_applicable, verdict
from src.extras.verify.subject import ROWS, Context, Sizes, Subject, mesh_keys
from src.model.params import STACKED, by_path, dotted
from src.parallel.mesh import MeshLayout
from src.step.plan import StepPlan
from src.step.state import TrainState, abstract_state
from src.system.errors import Unsupported
from src.system.imports import optional


def rows(context: Context) -> Iterator[Row]:
    """Compiles the step for each mesh without running it."""
    if not optional("aot"):
        yield not_applicable("compiled program", "src/extras/aot is missing")
        return
    for sizes in context.compiled:
        try:
            yield from _of_mesh(context.subject, sizes)
        except Unsupported as error:
            status = FAIL if is_own(sizes, context.whole.mesh) else NOT_APPLICABLE
            yield Row(mesh_name(sizes), status, note=first_line(error))
    yield _dtypes(context.subject, context.whole.step.dtype)


def _of_mesh(subject: Subject, sizes: Sizes) -> Iterator[Row]:
    mesh, plan = mesh_name(sizes), subject.plan(math.prod(sizes.values()), **mesh_keys(sizes))
    state = abstract_state(plan)
    traced = traced_step(plan, state, subject.loss, subject.length)
    text, warnings = _compiled(traced.lower())
    # XLA copies an array to every device if it cannot change its sharding otherwise, and says so only here.
    warned = re.findall(r'Involuntary full rematerialization.*?(?:op_name="(.*?)"|$)', warnings, re.MULTILINE)
    wrong = [name or "an operation without a name" for name in warned]
    dims, axes = by_path(plan.matrices), by_path(plan.axes)
    wrong += [dotted(path) for path in axes if dims[path].hidden and not any(axes[path][n] for n in dims[path].dims)]
    yield none_of(f"{mesh}: arrays whole on every device", wrong)
    header = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    aliased = {int(number) for number in re.findall(r"\{(\d+)\}: \(", header[1] if header else "")}
    leaves = jax.tree_util.tree_leaves_with_path(state)  # also the first outputs
    lost = [jax.tree_util.keystr(path) for number, (path, _) in enumerate(leaves) if number not in aliased]
    yield none_of(f"{mesh}: arrays of the state that are not donated", lost)
    yield none_of(f"{mesh}: gathered along a sharded dim", _gathered(plan, text, subject.length))
    yield _exchanged(f"{mesh}: bytes summed over devices", plan, state, text)


def _dtypes(subject: Subject, dtype: str) -> Row:
    """Finds matmuls with weights that are wider than the config's dtype."""
    if dtype == "float32":
        return not_applicable("dtypes of matmuls", "dtype=float32")
    plan, wide = subject.plan(dtype=dtype, matmul_precision="default"), []
    shapes = {dotted(path): leaf.shape for path, leaf in by_path(plan.shapes).items()}
    traced = traced_step(plan, abstract_state(plan), subject.loss, subject.length)
    for eqn, is_batched, _ in matmuls(traced.jaxpr.jaxpr):
        place, arrays = f"/{eqn.source_info.name_stack}", [each.aval for each in eqn.invars[:2]]
        # Routers compute in float32; so may scores and recurrences, whose matmuls have a batch dim.
        if not (is_batched or "/router" in place) and max(each.dtype.itemsize for each in arrays) > 2:
            given = {each.size for each in arrays}  # a weight's dims may be merged; of all layers, or of one
            names = [name for name, shape in shapes.items() if {math.prod(shape), math.prod(shape[1:])} & given]
            wide.append(f"{place} {' x '.join(each.str_short() for each in arrays)}, {' or '.join(names)}".strip(", "))
    return none_of(f"matmuls with weights that are not in {dtype}", wide)


def _gathered(plan: StepPlan, text: str, length: int) -> list[str]:
    """Lists the arrays that devices gather along a dim of a weight that stays sharded.

    Devices with other tokens gather weights along the axes of rows and sequences. No device needs more than its part
    of heads, the feed-forward width, experts or the vocabulary, whose mesh axes shard no tokens, or along which tokens
    travel. An array is found by its shape: a layer's weight, or one with a size that only such a dim has.
    """
    from src.extras.aot.hlo import collectives, first_array, found, parse

    layout, axes = plan.layout, by_path(plan.axes)
    weights = {  # the logical axes and sizes of one layer's dims
        path: [(axis, size) for axis, size in zip(axes[path], each.shape, strict=True) if axis not in STACKED[:2]]
        for path, each in by_path(plan.shapes).items()
    }
    split = {*layout.axes("batch"), *layout.axes("length")}
    stay = {axis: {*layout.axes(axis)} for dims in weights.values() for axis, _ in dims if axis}
    stay = {axis: along for axis, along in stay.items() if along and (axis == "expert" or not along & split)}
    dims_of = [dim for dims in weights.values() for dim in dims]
    sizes = {axis: {size for each, size in dims_of if each == axis} for axis, _ in dims_of}
    named = {each.name: each for computation in parse(text)[0].values() for each in computation.values()}
    wrong = []
    for each in collectives(text, layout.mesh):
        if each.kind != "all-gather" or not each.times + each.per_round:
            continue
        shape = first_array(named[each.name].type.split("), (")[-1])[1]
        whole = shape[int(found(r" dimensions=\{(\d+)\}", named[each.name].attributes)[1])]
        for axis in (axis for axis, along in stay.items() if along.intersection(each.axes) and whole in sizes[axis]):
            near = {dotted(path): _match(dims, axis, shape, layout) for path, dims in weights.items()}
            others = {length, *(size for other in sizes if other != axis for size in sizes[other])}
            if any(near.values()) or (whole > ROWS and whole not in others):
                same = [path for path, match in near.items() if match and match == max(near.values())]
                what = " or ".join(same) or f"an array {shape}"
                wrong.append(f"{what}, whole along {axis} by an all-gather over {' x '.join(each.axes)}")
    return wrong


def _match(dims: Sequence[tuple[str | None, int]], axis: str, shape: Sequence[int], layout: MeshLayout) -> int:
    """Tells whether an array is a weight that is whole along `axis`: 2 if its dims are in this order, 1 in another.

    The other dims may be sharded.
    """
    choices = [{size, size if each == axis else size // layout.size(layout.axes(each))} for each, size in dims]
    sizes = [size for size in shape if size > 1]
    found = [[size for size in chosen if size > 1] for chosen in itertools.product(*choices)]
    has_axis = axis in dict(dims)
    return has_axis * (2 if sizes in found else int(sorted(sizes) in map(sorted, found)))


def _exchanged(name: str, plan: StepPlan, state: TrainState, text: str) -> Row:
    """Lists the collectives; fails if they sum fewer bytes than the gradients have.

    R of N devices share the rows of a batch, and each has a part, at least R / N, of every gradient to sum with them.
    An expert's tokens travel to it along the axis expert, which therefore does not count.
    """
    from src.extras.aot.hlo import collectives

    row_axes, sizes, summed = {*plan.layout.axes("batch")} - {"expert"}, Counter[str](), 0
    for each in collectives(text, plan.layout.mesh):
        size = each.times * each.whole_bytes
        sizes[f"{each.kind} over {' x '.join(each.axes)}"] += size
        summed += size * (each.kind in ("all-reduce", "reduce-scatter") and bool(row_axes.intersection(each.axes)))
    trained = jax.tree.leaves(state.weights.trainable)
    gradients = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in trained)
    least = round(gradients * plan.layout.size([*row_axes]) / plan.layout.mesh.size) * bool(row_axes)
    listed = ", ".join(f"{kind} {n:,}" for kind, n in sizes.most_common())
    if not least:
        return not_applicable(name, f"no two devices have different rows; {listed}")
    return verdict(name, max(0, least - summed), 0, f"{summed:,} of at least {least:,} bytes; {listed}")


def _compiled(lowered: jax.stages.Lowered) -> tuple[str, str]:
    """Compiles; returns the program's text, and what XLA's C++ code wrote to the process's stderr."""
    with tempfile.TemporaryFile() as file:
        kept, cached = os.dup(2), jax.config.jax_enable_compilation_cache
        os.dup2(file.fileno(), 2)
        jax.config.update("jax_enable_compilation_cache", False)  # a cached program comes without warnings
        try:
            # It is not run, and collectives do not depend on how code is optimized.
            text = lowered.compile({"xla_backend_optimization_level": 0}).as_text() or ""
        finally:
            jax.config.update("jax_enable_compilation_cache", cached)
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return text, file.read().decode(errors="replace")
