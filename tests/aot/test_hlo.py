"""Collectives read from programs whose collectives are known: written by hand, or counted from shapes."""

import math
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from src.extras.aot.hlo import Collective, collectives
from src.step.trace import trace_train_step
from tests.tiny import load

P = PartitionSpec
ROWS, COLUMNS = 32, 6
SHARD = ROWS // 8 * COLUMNS * 4  # bytes of a device's part of float32 [ROWS, COLUMNS]


def mesh(*shape, names=("data", "tensor")):
    return Mesh(np.array(jax.devices()).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def compiled(body, mesh, out):
    """The text of `body` on each device's [4, 6] of an array over the whole mesh."""
    program = jax.shard_map(body, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=out, check_vma=False)
    return jax.jit(program).lower(jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)).compile().as_text()


def ring(size, hop=1):
    return [(i, (i + hop) % size) for i in range(size)]


ALL = P(("data", "tensor"))
# On a mesh of 2 x 4: what is computed, and what of it is known beforehand.
KNOWN = {
    "gather": (
        lambda x: jax.lax.all_gather(x, "tensor", tiled=True),
        P("data"),
        ("all-gather", ("tensor",), 4 * SHARD, 3 * SHARD),
    ),
    "gather over both": (
        lambda x: jax.lax.all_gather(x, ("data", "tensor"), tiled=True),
        P(),
        ("all-gather", ("data", "tensor"), 8 * SHARD, 7 * SHARD),
    ),
    "scatter": (
        lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True),
        ALL,
        ("reduce-scatter", ("tensor",), SHARD, SHARD * 3 // 4),
    ),
    "sum": (lambda x: jax.lax.psum(x, "data"), P("tensor"), ("all-reduce", ("data",), SHARD, SHARD)),
    "sum over both": (
        lambda x: jax.lax.psum(x, ("data", "tensor")),
        P(),
        ("all-reduce", ("data", "tensor"), SHARD, SHARD * 7 // 4),
    ),
    "exchange": (
        lambda x: jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True),
        ALL,
        ("all-to-all", ("tensor",), SHARD, SHARD * 3 // 4),
    ),
    "shift": (lambda x: jax.lax.ppermute(x, "tensor", ring(4)), ALL, ("collective-permute", ("tensor",), SHARD, SHARD)),
}


@pytest.mark.parametrize(("body", "out", "expected"), KNOWN.values(), ids=KNOWN)
def test_one_collective(body, out, expected):
    kind, axes, whole, sent = expected
    found = collectives(compiled(body, mesh(2, 4), out), mesh(2, 4))
    assert found == [Collective(kind, axes, "ici", 1, whole, sent)]


def test_groups_over_two_of_three_axes():
    three = mesh(2, 2, 2, names=("a", "b", "c"))
    text = compiled(lambda x: jax.lax.psum(x, ("a", "c")), three, P("b"))
    assert [each.axes for each in collectives(text, three)] == [("a", "c")]


def test_axes_of_one_device_are_none_and_move_nothing():
    flat = mesh(8, 1)
    assert collectives(compiled(lambda x: jax.lax.psum(x, "tensor"), flat, P("data")), flat) == []
    found = collectives(compiled(lambda x: jax.lax.psum(x, ("data", "tensor")), flat, P()), flat)
    assert [each.axes for each in found] == [("data",)]


def test_loops_multiply_what_is_in_them():
    def body(x):
        def outer(x, _):
            x, _ = jax.lax.scan(lambda x, _: (jnp.sin(jax.lax.psum(x, "tensor")), None), x, None, length=5)
            return jax.lax.ppermute(x, "data", ring(2)), None

        x, _ = jax.lax.scan(outer, x, None, length=3)
        return jax.lax.psum(x, "data")

    found = collectives(compiled(body, mesh(2, 4), P("tensor")), mesh(2, 4))
    times = {(each.kind, each.axes): each.times for each in found}
    assert times == {
        ("all-reduce", ("tensor",)): 15,
        ("collective-permute", ("data",)): 3,
        ("all-reduce", ("data",)): 1,
    }


def on_hosts(size):
    """A stand-in for a mesh of 2 x 4 on hosts of `size` devices each."""
    client = SimpleNamespace(runtime_type="compile_only_runtime")
    devices = [
        SimpleNamespace(id=i, platform="gpu", process_index=i // size, slice_index=0, client=client) for i in range(8)
    ]
    return SimpleNamespace(devices=np.array(devices, dtype=object).reshape(2, 4), axis_names=("data", "tensor"), size=8)


def test_what_leaves_a_host():
    """A ring through two hosts of four leaves each once: of what eight devices send, two parts in eight."""
    body, out, (kind, axes, whole, sent) = KNOWN["sum over both"]
    found = collectives(compiled(body, mesh(2, 4), out), on_hosts(4))
    assert found == [
        Collective(kind, axes, "ici", 1, whole, sent * 3 // 4),
        Collective(kind, axes, "dcn", 1, whole, sent // 4),
    ]
    for name, host, network in (("sum", 4, "dcn"), ("scatter", 4, "ici"), ("scatter", 1, "dcn")):
        body, out, (kind, axes, whole, sent) = KNOWN[name]
        found = collectives(compiled(body, mesh(2, 4), out), on_hosts(host))
        assert found == [Collective(kind, axes, network, 1, whole, sent)]


def test_an_exchange_between_hosts():
    """Of three parts in four that a device sends, one goes to its neighbour and two to the other host."""
    body, out, (kind, axes, whole, _) = KNOWN["exchange"]
    found = collectives(compiled(body, mesh(2, 4), out), on_hosts(2))
    assert found == [
        Collective(kind, axes, "ici", 1, whole, whole // 4),
        Collective(kind, axes, "dcn", 1, whole, whole // 2),
    ]


def test_a_shift_between_hosts():
    body, out, (kind, axes, whole, sent) = KNOWN["shift"]
    found = collectives(compiled(body, mesh(2, 4), out), on_hosts(2))
    assert found == [Collective(kind, axes, network, 1, whole, sent) for network in ("ici", "dcn")]


def test_a_step_with_sharded_weights_gathers_them_twice_and_sums_their_gradients_once():
    """Layers are gathered forward and backward, the embedding and the output once; norms lie on every device."""
    traced = trace_train_step(load(remat_policy="full", vocab_size=128, ici_fsdp_parallelism=8), jax.devices())
    found = collectives(traced.jax_traced.lower().compile().as_text(), traced.plan.layout.mesh)
    moved = Counter()
    for each in found:
        moved[each.kind, each.axes] += each.times * each.whole_bytes
    sizes = {"layers": 0, "tables": 0, "norms": 0}
    for path, leaf in jax.tree.leaves_with_path(traced.plan.shapes):
        name = jax.tree_util.keystr(path)
        part = "norms" if "norm" in name else "layers" if "segments" in name else "tables"
        sizes[part] += 4 * math.prod(leaf.shape)
    assert moved.keys() == {("all-gather", ("fsdp",)), ("all-reduce", ("fsdp",))}
    assert moved["all-gather", ("fsdp",)] == 2 * sizes["layers"] + sizes["tables"]
    # On CPUs XLA sums a gradient on every device, for each to keep its part; beside it only some numbers of the loss.
    assert moved["all-reduce", ("fsdp",)] == pytest.approx(sum(sizes.values()), rel=1e-3)


# What follows is text as the TPU compiler writes it, for no TPU is needed to read it.
def slices(count):
    """A stand-in for a mesh of `count` TPU slices of 2 x 4 devices."""
    devices = [
        SimpleNamespace(id=(100_000 * (s + 1) if count > 1 else 0) + i, platform="tpu", slice_index=s, coords=[x, y, 0])
        for s in range(count)
        for i, (x, y) in enumerate((x, y) for x in range(2) for y in range(4))
    ]
    shape = (count, 2, 4)
    return SimpleNamespace(
        devices=np.array(devices, dtype=object).reshape(shape), axis_names=("data", "fsdp", "tensor"), size=8 * count
    )


def program(lines, partitions=8, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule step, num_partitions={partitions}\n\n{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": ("tensor",),
    "[2,4]<=[8]": ("tensor",),
    "{{0,4},{1,5},{2,6},{3,7}}": ("fsdp",),
    "[4,2]<=[2,4]T(1,0)": ("fsdp",),
    "{}": ("fsdp", "tensor"),
    "[1,8]<=[8]": ("fsdp", "tensor"),
    "mesh['a'=2,'b'=4] {'a'}": ("fsdp",),
    "mesh['a'=2,'b'=4] {'b'}": ("tensor",),
    "mesh['a'=2,'b'=1,'c'=4] {'a','b','c'}": ("fsdp", "tensor"),
    "mesh['a'=8] {'a':(1)2}": ("fsdp",),  # of 8 in two times four: the two
    "mesh['a'=8] {'a':(2)4}": ("tensor",),  # and the four
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": ("fsdp",),
    "mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}": ("tensor",),
}


@pytest.mark.parametrize(("written", "axes"), GROUPS.items())
def test_ways_to_write_groups(written, axes):
    line = f"ROOT %r = bf16[64,32]{{1,0:T(8,128)(2,1)S(1)}} all-reduce(%p), replica_groups={written}, to_apply=%add"
    n = {("tensor",): 4, ("fsdp",): 2, ("fsdp", "tensor"): 8}[axes]
    # One or two dims, of two, each a line with half of a ring's bandwidth.
    links = {("tensor",): 0.25, ("fsdp",): 0.25, ("fsdp", "tensor"): 0.5}[axes]
    whole = 64 * 32 * 2
    found = collectives(program([line]), slices(1))
    assert found == [Collective("all-reduce", axes, "ici", 1, whole, round(2 * whole * (n - 1) / n), links)]


def test_the_two_devices_of_a_chip_have_a_link_of_their_own():
    """Four chips, 2 x 2, of two devices each, which the last axis of the mesh joins."""
    devices = [
        SimpleNamespace(id=2 * x + 4 * y + core, platform="tpu", coords=[x, y, 0])
        for y in range(2)
        for x in range(2)
        for core in range(2)
    ]
    names = ("data", "fsdp", "tensor")
    chips = SimpleNamespace(devices=np.array(devices, dtype=object).reshape(2, 2, 2), axis_names=names, size=8)

    def links(line):
        (found,) = collectives(program([line]), chips)
        return found.axes, found.links

    gather = "%g = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[8]"
    assert links(gather) == (("tensor",), 1.0)
    assert links(f"{gather[:-3]}[2,2,2]T(0,2,1)") == (("fsdp",), 0.25)
    assert links("%s = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}") == (("tensor",), 1.0)


TYPES = {
    "(bf16[16,8]{1,0:T(8,128)(2,1)}, bf16[64,8]{1,0:T(8,128)(2,1)}) all-gather-start": ("all-gather", 64 * 8 * 2),
    "((f32[2], f32[3,4]), (f32[8], f32[3,16])) all-gather-start": ("all-gather", (8 + 48) * 4),
    "((f32[8,2]{1,0}), f32[2,2]{1,0}) reduce-scatter-start": ("reduce-scatter", 8 * 2 * 4),
    "(f32[7], s8[5]) all-reduce-start": ("all-reduce", 7 * 4 + 5),
    "(u8[9]{0}, u8[9]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start": ("collective-permute", 9),
    "(pred[2,8], pred[2,8], /*index=2*/f8e4m3fn[3]) all-to-all": ("all-to-all", 16 + 16 + 3),
    "bf16[16,8]{1,0} collective-broadcast": ("collective-broadcast", 16 * 8 * 2),
}


@pytest.mark.parametrize(("written", "expected"), TYPES.items())
def test_types_of_what_is_started_and_combined(written, expected):
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    where = pairs if "permute" in written else "replica_groups=[2,4]<=[8]"
    found = collectives(program([f'%s = {written}(%p, %q), {where}, metadata={{op_name="f(x)"}}']), slices(1))
    assert [(each.kind, each.whole_bytes) for each in found] == [expected]


def test_a_broadcast_is_passed_on_whole():
    found = collectives(program(["%s = f32[8]{0} collective-broadcast(%p), replica_groups=[2,4]<=[8]"]), slices(1))
    assert found == [Collective("collective-broadcast", ("tensor",), "ici", 1, 32, 32, 0.25)]


def ragged(rows, room):
    """Rows of eight numbers to their experts, or back, into a buffer with room for so many."""
    return [
        f"%rows = bf16[{rows},8]{{1,0:T(8,128)(2,1)}} parameter(1)",
        f"%s = bf16[{room},8]{{1,0:T(8,128)(2,1)}} ragged-all-to-all(%rows, %into, %a, %b, %c, %d), "
        "replica_groups=[2,4]<=[8]",
    ]


@pytest.mark.parametrize(("rows", "room"), [(16, 20), (20, 16)])
def test_a_ragged_exchange_moves_the_rows_not_the_room(rows, room):
    """A buffer has a quarter of its rows to spare; of 16 a device keeps 4 and sends 12, there and back."""
    found = collectives(program(ragged(rows, room)), slices(1))
    assert found == [Collective("ragged-all-to-all", ("tensor",), "ici", 1, 16 * 8 * 2, 12 * 8 * 2, 0.25)]


def test_rounds_that_the_data_decide_are_told_apart():
    """Layers run five times; within each a loop runs as often as a number of the data says."""
    body = "\n".join(f"  {line}" for line in ragged(16, 20))
    others = f"""%windows (p: (u32[], u32[])) -> (u32[], u32[]) {{
{body}
  %q = (u32[], u32[]) parameter(0)
  %i = u32[] get-tuple-element(%q), index=0
  %n = u32[] get-tuple-element(%q), index=1
  %one = u32[] constant(1)
  %next = u32[] add(%i, %one)
  ROOT %t = (u32[], u32[]) tuple(%next, %n)
}}

%more (p: (u32[], u32[])) -> pred[] {{
  %p = (u32[], u32[]) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  %n = u32[] get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%layer (p: (u32[], u32[])) -> (u32[], u32[]) {{
  %p = (u32[], u32[]) parameter(0)
  %one = u32[] constant(1)
  %count = u32[] get-tuple-element(%p), index=1
  %start = (u32[], u32[]) tuple(%one, %count)
  %y = f32[8]{{0}} collective-permute(%x), source_target_pairs={{{{0,4}},{{4,0}}}}
  ROOT %w = (u32[], u32[]) while(%start), condition=%more, body=%windows
}}
"""
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    lines = [f"ROOT %w = (u32[], u32[]) while(%init), condition=%any, body=%layer, {known}"]
    exchange, permute = collectives(program(lines, others=others), slices(1))[::-1]
    assert (permute.kind, permute.times, permute.per_round) == ("collective-permute", 5, 0)
    assert (exchange.kind, exchange.times, exchange.per_round) == ("ragged-all-to-all", 0, 5)


def fusion(name, line, root):
    return f"%{name} (p: f32[2]) -> f32[8] {{\n  %g = {line}\n  ROOT %r = {root}\n}}\n\n"


def test_a_gather_hidden_in_fusions_is_one_gather():
    """It starts in one fusion, goes on in another and ends in a third; each names it."""
    gather = 'f32[8]{0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="1"}'
    others = (
        fusion("first", gather, 'f32[8]{0} custom-call(%g), custom_call_target="AsyncCollectiveStart"')
        + fusion("second", gather, "(f32[8]{0}, f32[8]{0}) tuple(%p, %g)")
        + fusion("third", gather, 'f32[8]{0} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"')
    )
    lines = [f"%{name} = f32[8]{{0}} fusion(%p), kind=kCustom, calls=%{name}" for name in ("first", "second", "third")]
    found = collectives(program(lines, others=others), slices(1))
    assert found == [Collective("all-gather", ("tensor",), "ici", 1, 32, 24, 0.25)]


def test_a_sum_fused_with_the_slice_of_it_is_a_scatter():
    others = fusion(
        "all-reduce-scatter.2", "f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[8]", "f32[2]{0} dynamic-slice(%g, %i)"
    )
    found = collectives(
        program(["%s = f32[2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2"], 8, others), slices(1)
    )
    assert found == [Collective("reduce-scatter", ("tensor",), "ici", 1, 32, 24, 0.25)]


def test_rounds_of_a_loop_that_counts():
    """From 1 to below 8 in steps of 2: 1, 3, 5, 7."""
    others = """%body (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  %p = (f32[8]{0}, u32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %i = u32[] get-tuple-element(%p), index=1
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  %y = f32[8]{0} collective-permute(%x), source_target_pairs={{0,4},{4,0}}
  ROOT %t = (f32[8]{0}, /*index=1*/u32[]) tuple(%y, /*index=1*/%next)
}

%condition (p: (f32[8], u32[])) -> pred[] {
  %p = (f32[8]{0}, u32[]) parameter(0)
  %i = u32[] get-tuple-element(%p), index=1
  %bound = u32[] constant(8)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}
"""
    lines = [
        "%one = u32[] constant(1)",
        "%start = u32[] copy(%one)",
        "%init = (f32[8]{0}, u32[]) tuple(%p, %start)",
        "ROOT %w = (f32[8]{0}, u32[]) while(%init), condition=%condition, body=%body",
    ]
    found = collectives(program(lines, others=others), slices(1))
    assert found == [Collective("collective-permute", ("fsdp",), "ici", 4, 32, 32, 0.5)]


def between(kind, target, type_="f32[16,2]{1,0:T(8,128)}"):
    return (
        f"%{kind} = ({type_}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, frontend_attributes={{"
        f'_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"}}, backend_config={{"flag_configs":[]}}'
    )


def listed(groups):
    return "{" + ",".join("{" + group + "}" for group in groups) + "}"


def test_between_slices():
    """Four slices; each program's own groups are those of one slice, what goes between them is sent."""
    same_place = [f"{100_000 + i},{200_000 + i},{300_000 + i},{400_000 + i}" for i in range(8)]
    whole = 16 * 2 * 4
    lines = [
        between("ALL_REDUCE", '"{1,2,3,4}x{0:7}"'),
        between("ALL_GATHER", listed(same_place)),
        between("REDUCE_SCATTER", listed(same_place)),
        between("ONE_TO_ONE", "{{100000->200000},{200000->300000}}"),
        "%r = f32[8]{0} all-reduce(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    ]
    assert collectives(program(lines), slices(4)) == [
        Collective("all-reduce", ("data",), "dcn", 1, whole, whole * 6 // 4),
        Collective("all-gather", ("data",), "dcn", 1, 4 * whole, 3 * whole),
        Collective("reduce-scatter", ("data",), "dcn", 1, whole, whole * 3 // 4),
        Collective("collective-permute", ("data",), "dcn", 1, whole, whole),
        Collective("all-reduce", ("fsdp",), "ici", 1, 32, 32, 0.25),
    ]


@pytest.mark.parametrize(("sent", "received"), [(2048, 2560), (2560, 2048)])
def test_a_ragged_exchange_between_slices_moves_the_rows_not_the_room(sent, received):
    """Sixteen devices of two slices have all experts: of 2,048 rows half leaves the slice, and a sixteenth stays."""
    every = ",".join(str(100_000 * s + i) for s in (1, 2) for i in range(8))
    rendezvous = '_xla_host_transfer_rendezvous="ragged_all_to_all.7_0",_xla_megascale_ragged_operand_index="0",'
    send, recv = (
        between("RAGGED_ALL_TO_ALL", listed([every]), f"bf16[{rows * 1024}]{{0:T(1024)(128)(2,1)}}").replace(
            "_xla_megascale_target", f"{rendezvous}_xla_megascale_target"
        )
        for rows in (sent, received)
    )
    lines = [send, recv.replace(" send(%p, %t)", " recv(%t)").replace("%RAGGED", "%recv_RAGGED")]
    whole = 2048 * 1024 * 2
    within, beyond = collectives(program(lines), slices(2))
    assert (within.network, within.sent_bytes) == ("ici", whole * 7 // 16)
    assert (beyond.network, beyond.sent_bytes) == ("dcn", whole * 8 // 16)
