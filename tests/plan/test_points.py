"""Which points a search enumerates: against brute force, and with keys that are typed."""

import itertools
import math

import jax
import pytest

from src.config.schema import MESH_AXES, size_key
from src.extras.aot.topology import parse_topology
from src.extras.plan import costing
from src.extras.plan.costing import cost
from src.extras.plan.estimate import step_costs
from src.extras.plan.output import omitted_lines
from src.extras.plan.points import Point, Space
from src.parallel.chips import GPU_HOSTS
from src.parallel.mesh import global_batch_size, make_layout
from src.parallel.slices import divisors
from src.step.state import abstract_batch
from src.step.trace import plan_step
from src.system.errors import UserError
from tests.tiny import load

FOUR = parse_topology("cpu-4", 1)._replace(chip=GPU_HOSTS["a3"])
CPUS = parse_topology("cpu-8", 1)._replace(chip=GPU_HOSTS["a3"])
HOSTS = parse_topology("a3:2", 4)
AXES = [size_key(kind, axis) for kind in ("ici", "dcn") for axis in MESH_AXES]


def space(topology=CPUS, typed=(), rows=8, quantizations=(), **keys):
    return Space(load(**keys), topology, typed, rows, quantizations)


def refused(found, point):
    try:
        step_costs(found.config.replace(**point.keys), found.topology)
    except UserError:
        return True
    return False


def sizes_of(mesh):
    return tuple(mesh[key] for key in AXES)


def test_meshes_are_those_that_multiply_out():
    found = space(HOSTS)
    expected = set()
    # No experts, and no tensor axis between hosts.
    axes = [axis for axis in MESH_AXES if axis != "expert"]
    between = [axis for axis in axes if axis != "tensor"]
    for ici in itertools.product(divisors(2), repeat=len(axes)):
        for dcn in itertools.product(divisors(4), repeat=len(between)):
            mesh = dict.fromkeys(AXES, 1)
            mesh |= {size_key("ici", axis): size for axis, size in zip(axes, ici, strict=True)}
            mesh |= {size_key("dcn", axis): size for axis, size in zip(between, dcn, strict=True)}
            if math.prod(ici) == 2 and math.prod(dcn) == 4:
                expected.add(sizes_of(mesh))
    meshes = [sizes_of(mesh) for mesh in found.meshes()]
    assert set(meshes) == expected
    assert len(meshes) == len(expected) == 5 * (4 + 6)


def test_points_are_all_that_a_step_of_the_same_batch_can_be_planned_with():
    """Every mesh, size and number of micro-batches of 8 sequences, tried on devices."""
    typed = ("remat_policy", "num_vocab_tiling", "shard_optimizer_over_data", "num_pipeline_microbatches")
    found = space(FOUR, typed=typed, base_num_kv_heads=4, num_vocab_tiling=1)
    accepted = {
        (sizes_of(point.mesh), point.batch["per_device_batch_size"], point.batch["gradient_accumulation_steps"])
        for point in found.points()
        if not refused(found, point)
    }
    expected, axes = set(), [axis for axis in MESH_AXES if axis != "expert"]
    for sizes in itertools.product(divisors(4), repeat=len(axes)):
        mesh = dict.fromkeys(AXES, 1) | {size_key("ici", axis): n for axis, n in zip(axes, sizes, strict=True)}
        for passes in divisors(8):
            each = 2 / passes
            keys = {**mesh, "per_device_batch_size": each, "gradient_accumulation_steps": passes}
            try:
                config = found.config.replace(**keys)
                plan = plan_step(config, make_layout(config.mesh, jax.devices()[:4]))
                rows = global_batch_size(plan.layout, each, passes, "per_device_batch_size")
                abstract_batch(plan, rows, config.batch.max_target_length)
            except UserError:
                continue
            expected.add((sizes_of(mesh), each, passes))
    assert accepted == expected
    assert len(expected) > 20


def test_typed_keys_keep_their_values():
    typed = {"ici_tensor_parallelism": 2, "remat_policy": "minimal", "gradient_accumulation_steps": 2}
    found = space(typed=typed, num_vocab_tiling=2, **typed)
    points = list(found.points())
    assert points
    assert all({key: point.keys[key] for key in typed} == typed for point in points)
    assert {point.keys["num_vocab_tiling"] for point in points} == {2, 8}
    assert not any("num_vocab_tiling" in point.keys for point in space(typed=("num_vocab_tiling",)).points())


def test_a_typed_size_of_minus_one_is_free():
    meshes = space(typed=("ici_fsdp_parallelism",)).meshes()
    assert {mesh["ici_fsdp_parallelism"] for mesh in meshes} == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        ({"ici_tensor_parallelism": 3}, "ici_tensor_parallelism=3 does not divide 8 devices of a slice or host"),
        ({"dcn_data_parallelism": 2}, "dcn_data_parallelism=2 does not divide 1 slices or hosts: the product may be 1"),
    ],
)
def test_a_typed_size_that_divides_nothing_is_refused(keys, answer):
    with pytest.raises(UserError, match=answer):
        list(space(typed=keys, **keys).meshes())


def test_a_batch_that_divides_over_no_mesh_is_refused():
    with pytest.raises(
        UserError, match="no mesh of 8 devices suits this model, this batch and ici_fsdp_parallelism=8: 8 shards"
    ):
        cost(space(rows=3, typed=("ici_fsdp_parallelism",), ici_fsdp_parallelism=8))


def test_a_free_batch_is_of_any_size_and_one_pass():
    points = list(space(rows=None, typed=("ici_fsdp_parallelism",), ici_fsdp_parallelism=8).points())
    assert {point.batch["gradient_accumulation_steps"] for point in points} == {1}
    assert {1.0, 8.0, 64.0} < {point.batch["per_device_batch_size"] for point in points}


def test_eight_bits_are_tried_only_if_allowed():
    assert not any("quantization" in point.keys for point in space().points())
    assert {point.keys["quantization"] for point in space(quantizations=["fp8"]).points()} == {"", "fp8"}


def test_a_point_is_described_in_words():
    mesh = dict.fromkeys(AXES, 1) | {"ici_fsdp_parallelism": 2, "dcn_data_parallelism": 4}
    custom = {"remat_policy": "custom", "remat_custom": {"out_proj": "offload"}}
    batch = {"per_device_batch_size": 0.5, "gradient_accumulation_steps": 3}
    point = Point(mesh, {"shard_optimizer_over_data": True}, custom, batch, {"num_vocab_tiling": 8})
    words = "fsdp 2 | data 4, custom: out_proj offload, batch 0.5 x 3, optimizer sharded, 8 loss tiles"
    assert point.words == words


def test_every_point_is_a_candidate_or_is_counted_among_those_left_out():
    found = space(HOSTS, typed=("remat_policy",))
    costs = cost(found)
    groups = [*costs.too_large.values(), *costs.too_slow.values()]
    assert costs.points == len(costs.candidates) + costs.no_gain + sum(group.points for group in groups)
    assert costs.points == sum(1 for mesh in found.meshes() for point in of_mesh(found, mesh))


def test_points_that_exceed_host_memory_are_left_out_and_do_not_end_the_walk(monkeypatch):
    """The fastest ones that need little device memory: fewer sequences at a time need less of the host's."""
    typed = {"remat_policy": "custom", "remat_custom": "{decoder_layer_input: offload}"}
    found = space(HOSTS, typed=typed, **typed)
    free = cost(found)
    assert not free.too_large_on_host
    limit = min(each.on_host for each in free.candidates)
    monkeypatch.setattr(costing, "host_capacity", lambda topology: limit)
    limited = cost(found)
    assert limited.candidates
    assert max(each.on_host for each in limited.candidates) <= limit
    [(policy, group)] = limited.too_large_on_host.items()
    assert policy == "custom: decoder_layer_input offload"
    assert group.points > 0
    assert group.best.on_host > limit
    assert any(line.startswith(f"{group.points:,} points should need more than ") for line in omitted_lines(limited))
    monkeypatch.setattr(costing, "host_capacity", lambda topology: 1)
    nearest = cost(found)
    assert nearest.candidates[0].on_host == nearest.too_large_on_host[policy].best.on_host > 1


def test_a_long_costing_says_how_far_it_is(monkeypatch):
    """By a clock that goes on by 30 seconds whenever it is read."""
    now = [0.0]

    def clock():
        now[0] += 30
        return now[0]

    monkeypatch.setattr(costing.time, "monotonic", clock)
    lines = []
    found = space(HOSTS, typed=("remat_policy",))
    cost(found, lines.append)
    count = len(list(found.meshes()))
    assert lines[0] == f"costing     meshes: 1 of {count}"  # which has traced the model: no measure of the others
    assert lines[1] == f"costing     meshes: 2 of {count}, about {costing.duration(30 * (count - 2))} left"
    assert any(line.startswith("costing     promising meshes' points: 1 of ") for line in lines)


def of_mesh(found, mesh):
    """The points of a mesh, none if the model does not divide over it."""
    variants = list(found.variants(mesh))
    points = [point for variant in variants for point in whole(found, mesh, variant)]
    return [] if any(refused(found, point) for point in points[:1]) else points


def whole(found, mesh, variant):
    parts = found.policies(), found.batches(mesh, variant), found.placements(mesh)
    return [Point(mesh, variant, *each) for each in itertools.product(*parts)]
