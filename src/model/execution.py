"""How a step runs: scanned or unrolled layers, pipeline stages, rematerialisation, and choices by platform."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from src.config.schema import Mesh
from src.config.step_keys import REMAT_POLICIES, Step
from src.model.spec import ModelSpec
from src.parallel.mesh import STAGE, MeshLayout
from src.system.errors import UserError

if TYPE_CHECKING:
    from src.model.pipeline import Schedule

MAX_UNROLLED = 16  # the most layers that scan_layers=auto unrolls, on a CPU: each of them is compiled separately


@dataclass(frozen=True)
class Execution:
    """How layer groups and the update run; these settings change results by no more than rounding."""

    scan_layers: bool = True
    remat_policy: str = "none"
    remat_custom: dict[str, str] = field(default_factory=dict)  # array -> device or offload
    schedule: "Schedule | None" = None  # of pipeline stages; None: one stage
    has_experts: bool = False  # then even remat_policy=none recomputes the gathered weights of experts
    grad_barriers: bool = False  # on TPUs: compute gradients early (`grad_barrier`), and `cast_matrices` once a step
    for_gpu: bool = False  # on GPUs: separate arrays for feed-forward factors; stack unrolled layers' gradients once
    update_in_branch: bool = False  # update in a conditional branch, entered once it is known whether to update

    @property
    def saved_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the arrays that a policy other than none saves on the device, and of those saved in host memory."""
        if self.remat_policy != "custom":
            return REMAT_POLICIES[self.remat_policy]
        places = self.remat_custom.items()
        return tuple(tuple(name for name, at in places if at == place) for place in ("device", "offload"))

    @property
    def mlp_in_halves(self) -> bool:
        """Whether to run wide feed-forward layers in halves: with `grad_barriers`, if hidden units are not saved."""
        return self.grad_barriers and self.remat_policy != "none" and "mlpwi" not in sum(self.saved_names, ())

    @property
    def recomputes_activated(self) -> bool:
        """Whether activation functions save only inputs: without remat, XLA on GPUs saves intermediates of gelu too."""
        return self.for_gpu and self.remat_policy == "none"

    def remat(self, block: Callable, repeats: int) -> Callable:
        """Wraps a block of a pattern that runs `repeats` times, to save only the policy's arrays for the backward pass.

        Returns the block itself if everything is saved: with remat_policy=none, and no experts.
        """
        if self.remat_policy == "none" and not self.has_experts:
            return block
        # A loop's body is compiled separately, so common-subexpression elimination cannot undo recomputation there; XLA
        # removes a loop of one iteration.
        return jax.checkpoint(block, policy=self._policy(), prevent_cse=not (self.scan_layers and repeats > 1))

    def remat_turn(self, run_turn: Callable) -> Callable:
        """Wraps a pipeline stage's turn to save what its blocks save, and its input, but no weights.

        Returns the turn itself with remat_policy=none: its blocks then save everything but experts' gathered weights.
        """
        if self.remat_policy == "none":
            return run_turn
        return jax.checkpoint(run_turn, policy=self._policy("decoder_layer_input"), prevent_cse=False)

    def _policy(self, *more: str) -> Callable[..., Any]:
        if self.remat_policy == "none":
            return jax.checkpoint_policies.save_anything_except_these_names("gathered_experts")
        on_device, on_host = self.saved_names
        on_device = {*on_device, *more} - {*on_host}
        if on_host:
            return jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=sorted(on_device),
                names_which_can_be_offloaded=list(on_host),
                offload_src="device",
                offload_dst="pinned_host",
            )
        return jax.checkpoint_policies.save_only_these_names(*sorted(on_device))


def make_schedule(mesh: Mesh, spec: ModelSpec, layout: MeshLayout) -> "Schedule | None":
    """Makes the schedule of pipeline stages, None for one stage; raises UserError if settings and mesh do not fit."""
    if layout.mesh.shape[STAGE] > 1:
        from src.model import pipeline

        return pipeline.make_schedule(mesh, spec, layout)
    if mesh.num_pipeline_microbatches != -1 or mesh.num_pipeline_repeats not in (-1, 1):
        raise UserError(
            "num_pipeline_microbatches and num_pipeline_repeats need more than one pipeline stage: set "
            "ici_pipeline_parallelism or dcn_pipeline_parallelism"
        )
    return None


def check_rows(rows: int, layout: MeshLayout, execution: Execution, key: str) -> None:
    """Raises Unsupported as `pipeline.check_rows` does, if there are several stages."""
    if execution.schedule:
        from src.model import pipeline

        pipeline.check_rows(rows, layout, execution.schedule, key)


def make_execution(step: Step, spec: ModelSpec, layout: MeshLayout, schedule: "Schedule | None") -> Execution:
    """Chooses how layers and the update run, by the configuration and the platform.

    `scan_layers=auto` unrolls at most MAX_UNROLLED layers on a single CPU device, because a loop would copy the arrays
    it saves for the backward pass. It scans elsewhere, also on several CPU devices, which simulate accelerators.
    """
    scans = step.scan_layers.lower() == "true"
    if step.scan_layers == "auto":
        scans = layout.platform != "cpu" or layout.mesh.size > 1 or len(spec.layers) > MAX_UNROLLED
    # XLA's TPU compiler would delay a gradient that only the optimizer needs to the end of the step, and hold its
    # inputs in memory throughout the backward pass.
    early = layout.platform == "tpu"
    # Update in a conditional branch, so that an offloaded state is on the device only there: except on TPUs, XLA would
    # hold it throughout the step. On a CPU, where each new array is made in a separate loop, XLA would otherwise copy
    # the old moments before it writes the new ones.
    branch = step.optimizer_memory_host_offload or layout.platform == "cpu"
    on_gpu = layout.platform == "gpu"
    return Execution(
        scans, step.remat_policy, dict(step.remat_custom), schedule, spec.has_experts, early, on_gpu, branch
    )
