"""Check j: the step as compiled for virtual devices: replicated arrays, donation, collectives, dtypes of matmuls."""

import functools
import itertools
import math
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from src.extras.verify.counts import equations, matmuls, traced_step
from src.extras.verify.meshes import is_own
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, Row, first_line, mesh_name, none_of, not_applicable
from src.extras.verify.subject import ROWS, Context, Sizes, Subject, flat, mesh_keys
from src.model.params import STACKED, Axes, Weights, by_path, dotted
from src.parallel.accumulate import accumulate
from src.parallel.mesh import MeshLayout, axes_of_dim
from src.step.loss import count_tokens
from src.step.matrices import MatrixDims
from src.step.plan import Batch, StepPlan
from src.step.state import TrainState, abstract_state
from src.step.train_step import loss_gradient, with_dropout_keys
from src.system.errors import Unsupported
from src.system.imports import optional

PRECISE = {"sin", "cos", "exp", "log", "rsqrt"}  # bfloat16's 8 bits of mantissa are too few for these


def rows(context: Context) -> Iterator[Row]:
    """Compiles the step for each mesh without running it, and checks the program's text; then dtypes of a traced step.

    A mesh that the model refuses is not applicable, or fails if it `is_own`.
    """
    if not optional("aot"):
        yield not_applicable("compiled program", "src/extras/aot is missing")
        return
    for sizes in context.compiled:
        try:
            yield from _of_mesh(context.subject, sizes)
        except Unsupported as error:
            status = FAIL if is_own(sizes, context.whole.mesh) else NOT_APPLICABLE
            yield Row(mesh_name(sizes), status, note=first_line(error))
    yield from _dtypes(context.subject, context.whole.step.dtype)
    yield _sums(context.subject, context.whole.step.weight_dtype)


def _of_mesh(subject: Subject, sizes: Sizes) -> Iterator[Row]:
    mesh, plan = mesh_name(sizes), subject.plan(math.prod(sizes.values()), **mesh_keys(sizes))
    state = abstract_state(plan)
    traced = traced_step(plan, state, subject.loss, subject.length)
    text, warnings = _compiled(traced.lower())
    # XLA copies an array to every device if it cannot change its sharding otherwise, and only warns of that.
    warned = re.findall(r'Involuntary full rematerialization.*?(?:op_name="(.*?)"|$)', warnings, re.MULTILINE)
    wrong = [name or "an operation without a name" for name in warned]
    yield none_of(f"{mesh}: no array is whole", [*wrong, *_whole(plan, state)])
    header = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    aliased = {int(number) for number in re.findall(r"\{(\d+)\}: \(", header[1] if header else "")}
    leaves = jax.tree_util.tree_leaves_with_path(state)  # the program's first inputs and first outputs
    lost = [jax.tree_util.keystr(path) for number, (path, _) in enumerate(leaves) if number not in aliased]
    yield none_of(f"{mesh}: the state is donated", lost)
    yield none_of(f"{mesh}: sharded dims stay sharded", _gathered(plan, text, subject.length))
    yield _summed(f"{mesh}: gradients are summed", plan, text)


def _dtypes(subject: Subject, dtype: str) -> Iterator[Row]:
    """Finds matmuls with weights in which an operand has more than the 16 bits of `dtype`; routers are exempt.

    Also finds functions of PRECISE with results of only 16 bits, and arrays of integers, such as positions, that are
    converted to 16 bits.
    """
    if dtype == "float32":
        yield not_applicable("dtypes of matmuls", "dtype=float32")
        return
    plan, wide = subject.plan(dtype=dtype, matmul_precision="default"), []
    weights, experts = _weights(plan), max(layer.num_experts for layer in plan.spec.layers)
    traced = traced_step(plan, abstract_state(plan), subject.loss, subject.length)
    for eqn, is_batched, _ in matmuls(traced.jaxpr.jaxpr):
        place, arrays = f"/{eqn.source_info.name_stack}", [each.aval for each in (*eqn.invars[:2], *eqn.outvars)]
        given = {each.size for each in arrays}  # the result too: in the backward pass it is a weight's gradient
        near = [
            each for each in weights if given & {math.prod(each.shape) // count for count in each.counts(each.shape)}
        ]
        if is_batched:  # scores and recurrences may compute in float32, but not experts that have a capacity
            _, (batch, _) = eqn.params["dimension_numbers"]
            of_experts = [arrays[0].shape[dim] for dim in batch] == [experts]
            near = [each for each in near if of_experts and "expert" in each.axes]
        is_exempt = "/router" in place or (is_batched and not near)  # routers compute in float32
        if not is_exempt and max(each.dtype.itemsize for each in arrays[:2]) > 2:
            factors = " x ".join(each.str_short() for each in arrays[:2])
            wide.append(", ".join([f"{place} {factors}", *([" or ".join(each.name for each in near)] if near else [])]))
    yield none_of(f"matmuls with weights are in {dtype}", wide)
    narrow = []
    for eqn, _ in equations(traced.jaxpr.jaxpr):
        given = eqn.invars[0].aval if eqn.invars else None
        of_whole = given is not None and given.ndim > 0 and jnp.issubdtype(given.dtype, jnp.integer)  # 0-dim: constants
        rounds = eqn.primitive.name in PRECISE or (eqn.primitive.name == "convert_element_type" and of_whole)
        if rounds and eqn.outvars[0].aval.dtype in (jnp.bfloat16, jnp.float16):
            narrow.append(f"{eqn.primitive.name} at /{eqn.source_info.name_stack}")
    yield none_of("norms, softmax and positions are in float32", narrow)


def _sums(subject: Subject, dtype: str) -> Row:
    """Finds gradients of weights stored in `dtype` that are summed over micro-batches in less than float32."""
    name = "micro-batches are summed in float32"
    if dtype == "float32" or subject.config.step.gradient_accumulation_steps == 1:
        return not_applicable(name, "weight_dtype=float32, or one micro-batch")
    plan = subject.plan(weight_dtype=dtype)
    subject.check_fields(plan)

    def summed(weights: Weights, batch: Batch) -> Any:
        rows = with_dropout_keys(batch, jnp.int32(0), plan)
        gradient = functools.partial(loss_gradient, plan=plan, loss=subject.loss)
        return accumulate(gradient, (weights, count_tokens(batch, plan)), rows, plan.accumulation)[0]

    found = jax.eval_shape(summed, plan.split(plan.shapes), subject.batch)
    return none_of(name, [f"{path} in {leaf.dtype}" for path, leaf in flat(found).items() if leaf.dtype != jnp.float32])


class Weight(NamedTuple):
    """A weight's declaration and its sharding in a plan."""

    name: str
    axes: Axes
    shape: tuple[int, ...]
    dims: MatrixDims
    sharding: list[list[str]]  # for each dim, the mesh axes of several devices that shard it
    trained: bool

    @property
    def shards(self) -> set[str]:
        """All mesh axes that shard it."""
        return {axis for axes in self.sharding for axis in axes}

    def counts(self, shape: Sequence[int]) -> set[int]:
        """Numbers of arrays into which a program may split it: by layers, by the factors of feed-forwards, or both."""
        loops = [shape[dim] for dim in self.dims.batch if self.axes[dim] != "expert"]
        return {math.prod(chosen) for chosen in _subsets(loops)}


def _weights(plan: StepPlan) -> list[Weight]:
    trees = (plan.axes, plan.shapes, plan.matrices, plan.shardings, plan.roles)
    weights = []
    for path in by_path(plan.axes):
        axes, leaf, dims, sharding, role = (by_path(tree)[path] for tree in trees)
        along = [[axis for axis in axes_of_dim(part) if plan.layout.mesh.shape[axis] > 1] for part in sharding.spec]
        weights.append(Weight(dotted(path), axes, leaf.shape, dims, along, role == "trainable"))
    return weights


def _whole(plan: StepPlan, state: TrainState) -> list[str]:
    """Lists replicated hidden matrices (see `MatrixDims`), and replicated arrays of the state whose weight is sharded.

    A hidden matrix may be replicated if the mesh has neither fsdp nor an axis for one of its logical axes. An array of
    the state is matched with weights by its shape.
    """
    weights, layout = _weights(plan), plan.layout
    wrong = []
    for each in (each for each in weights if each.dims.hidden and not each.shards):
        axes = [axis for axis in each.axes if axis]
        if "fsdp" in layout.axes("embed") or not axes or any(map(layout.axes, axes)):
            wrong.append(each.name)
    shapes = {each.shape for each in weights if each.shards} - {each.shape for each in weights if not each.shards}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.shape in shapes and leaf.sharding.is_fully_replicated:
            wrong.append(jax.tree_util.keystr(path))
    return wrong


def _gathered(plan: StepPlan, text: str, length: int) -> list[str]:
    """Lists the all-gathers along a dim of a weight that should stay sharded.

    Weights are gathered along the mesh axes that shard the batch and sequences. Heads, the feed-forward width, experts
    and the vocabulary should stay sharded if their mesh axes shard no tokens, and experts always, because tokens travel
    to them. An array is recognised by its shape: a layer's weight, or one with a size that only such a dim has.
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
    wrong, rows = [], ROWS * plan.accumulation.micro_batches
    for each in collectives(text, layout.mesh):
        if each.kind != "all-gather" or not each.times + each.per_round:
            continue
        shape = first_array(named[each.name].type.split("), (")[-1])[1]
        whole = shape[int(found(r" dimensions=\{(\d+)\}", named[each.name].attributes)[1])]
        for axis in (axis for axis, along in stay.items() if along.intersection(each.axes) and whole in sizes[axis]):
            near = {dotted(path): _match(dims, axis, shape, layout) for path, dims in weights.items()}
            others = {length, *(size for other in sizes if other != axis for size in sizes[other])}
            without = [dims for dims in weights.values() if axis not in dict(dims)]
            # A weight without this axis may be gathered.
            if [*shape] in ([size for _, size in dims] for dims in without):
                continue
            if any(near.values()) or (whole > rows and whole not in others):
                same = [path for path, match in near.items() if match and match == max(near.values())]
                what = " or ".join(same) or f"an array {shape}"
                wrong.append(f"{what}, whole along {axis} by an all-gather over {' x '.join(each.axes)}")
    return wrong


def _match(dims: Sequence[tuple[str | None, int]], axis: str, shape: Sequence[int], layout: MeshLayout) -> int:
    """Tells whether an array of `shape` can be a weight that is whole along `axis`.

    `dims` are the weight's logical axes and sizes; along the other axes it may be whole or sharded. Returns 2 if the
    sizes match in this order, 1 if in another, and 0 if they do not or the weight lacks `axis`. Sizes of 1 are ignored.
    """
    choices = [{size, size if each == axis else size // layout.size(layout.axes(each))} for each, size in dims]
    sizes = [size for size in shape if size > 1]
    found = [[size for size in chosen if size > 1] for chosen in itertools.product(*choices)]
    has_axis = axis in dict(dims)
    return has_axis * (2 if sizes in found else int(sorted(sizes) in map(sorted, found)))


def _summed(name: str, plan: StepPlan, text: str) -> Row:
    """Finds matrices whose gradients are not summed along a mesh axis that shards tokens; notes all collectives."""
    from src.extras.aot.hlo import collectives, parse

    layout, kinds, sums = plan.layout, Counter[str](), defaultdict[str, Counter[int]](Counter)
    named = {each.name: each for computation in parse(text)[0].values() for each in computation.values()}
    for each in collectives(text, layout.mesh):
        kinds[f"{each.kind} over {' x '.join(each.axes)}"] += each.times * each.whole_bytes
        if each.kind in ("all-reduce", "reduce-scatter"):
            shards = layout.size(each.axes) if each.kind == "reduce-scatter" else 1  # its result is one shard
            for shape in re.findall(r"\w+\[([\d,]+)\]", named[each.name].type):
                for axis in each.axes:
                    sums[axis][shards * math.prod(map(int, shape.split(",")))] += each.times
    listed = ", ".join(f"{kind} {size:,} bytes" for kind, size in kinds.most_common())
    axes = [*layout.axes("batch"), *layout.axes("length")]
    if not axes:
        return not_applicable(name, f"no two devices have different tokens; {listed}")
    return none_of(name, [wrong for axis in axes for wrong in _not_summed(plan, axis, sums[axis])], listed)


def _not_summed(plan: StepPlan, axis: str, sums: Counter[int]) -> Iterator[str]:
    """Names matrices without a sum of their gradient along `axis`, a mesh axis that shards tokens.

    `sums` counts the arrays that are summed along it, by their number of entries. Devices hold a gradient sharded along
    the axes of its weight that shard no tokens; it may be summed like this, or divided further along other axes and
    into layers. One sum may fit several weights, so the sums are also counted per size and in total. Vectors are left
    out, because XLA sums them in other parts, and experts along the axes on which their tokens travel to them.
    """
    layout, least = plan.layout, 0
    only = defaultdict[int, Counter[str]](Counter)  # size -> sums that each weight needs, if no other size fits it
    wide = {each for each, size in layout.mesh.shape.items() if size > 1}
    for each in (each for each in _weights(plan) if each.trained and each.dims.reduction):
        travels = layout.axes("expert") if "expert" in each.axes else ()
        if axis in travels:
            continue
        stay = each.shards - {*layout.axes("batch"), *layout.axes("length")}.difference(travels)
        sizes = zip(each.shape, each.sharding, strict=True)
        local = [size // layout.size([along for along in axes if along in stay]) for size, axes in sizes]
        rounds = 1 if axis in plan.accumulation.manual_axes else plan.accumulation.micro_batches
        divided = [math.prod(local) // layout.size(along) for along in _subsets(wide - stay - {axis})]
        parts = [(size // count, count * rounds) for size in divided for count in sorted(each.counts(local))]
        found = {size: count for size, count in parts if sums[size] >= count}
        if not found:
            yield f"{each.name} over {axis}"
        for size in [*found] * (len(found) == 1):
            only[size][each.name] = found[size]
        least += min(divided) * rounds
    for size, counts in only.items():
        if counts.total() > sums[size]:
            yield f"{' or '.join(counts)} over {axis}"
    total = sum(size * times for size, times in sums.items())
    if total < least:
        yield f"{total:,} of at least {least:,} entries over {axis}"


def _subsets(items: Collection[Any]) -> Iterator[tuple[Any, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(items, size) for size in range(len(items) + 1))


def _compiled(lowered: jax.stages.Lowered) -> tuple[str, str]:
    """Compiles the program; returns its HLO text, and what XLA's C++ code wrote to the process's stderr."""
    with tempfile.TemporaryFile() as file:
        kept, cached = os.dup(2), jax.config.jax_enable_compilation_cache
        os.dup2(file.fileno(), 2)
        jax.config.update("jax_enable_compilation_cache", False)  # a cached program comes without warnings
        try:
            # The program is not run, so LLVM need not optimize its code. This does not change its collectives.
            text = lowered.compile({"xla_backend_optimization_level": 0}).as_text() or ""
        finally:
            jax.config.update("jax_enable_compilation_cache", cached)
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return text, file.read().decode(errors="replace")
