"""Lists settings that have no effect on a model and mesh; `config` finds those that other settings leave idle."""

from collections.abc import Iterator, Sequence

import jax

from src.config.schema import KEYS, LOGICAL_AXES, Mesh
from src.config.yaml import dump
from src.step.plan import StepPlan

# Dims of activations. No weight has them, but every model does.
_OF_ACTIVATIONS = ("batch", "length", "norm_length", "activation_embed")


def idle_settings(mesh: Mesh, plan: StepPlan) -> list[str]:
    """Returns a sentence for each key of `mesh`, and of the update of weights, that is set without effect here.

    A key with its default value is not listed.
    """
    shape, reasons = plan.layout.mesh.shape, {}
    if sum(size > 1 for size in shape.values()) < 2:
        reasons["mesh_axes"] = "at most one axis of this mesh has several devices"
    if len({device.process_index for device in plan.layout.mesh.devices.flat}) == 1:
        reasons["jax_distributed_heartbeat_timeout_seconds"] = "there is one process"
    if plan.accumulation.updates == plan.accumulation.weights:
        reasons["shard_optimizer_over_data"] = "this mesh has no replicas of weights to shard it over"
    if not plan.split(plan.shapes).stats:
        reasons["routed_bias_update_rate"] = "trainable_parameters and lora_rank leave the bias of no router to move"
    if not any(jax.tree.leaves(plan.split(plan.decays).trainable)):
        reasons["adam_weight_decay"] = "no weight that is trained decays"
    settings = {**vars(plan.step), **vars(mesh)}
    lines = [(key, settings[key], KEYS[key].default, why) for key, why in reasons.items()]
    lines += [(f"logical_axis_rules.{name}", *entry) for name, *entry in _idle_rules(mesh, plan)]
    return [f"{key}={dump(value)} has no effect: {why}" for key, value, default, why in lines if value != default]


def _idle_rules(mesh: Mesh, plan: StepPlan) -> Iterator[tuple[str, Sequence[str], Sequence[str], str]]:
    """Yields rules without effect: name, mesh axes, those by default, and why."""
    dims = {*_OF_ACTIVATIONS, *(name for axes in jax.tree.leaves(plan.axes, is_leaf=_is_axes) for name in axes)}
    for name, axes in mesh.logical_axis_rules.items():
        default = LOGICAL_AXES[name][0]
        ours, theirs = ([each for each in names if plan.layout.mesh.shape[each] > 1] for names in (axes, default))
        if name not in dims:
            yield name, axes, default, f"no array of this model has a dim {name}"
        elif ours == theirs:
            yield name, axes, default, "it differs from the default only in mesh axes of one device"


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple)
