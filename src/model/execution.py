"""How a step runs: layers scanned or not, in pipeline stages; what is kept for the backward pass; for which devices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from src.config.schema import Mesh
from src.config.step_keys import REMAT_POLICIES, Step
from src.model.spec import ModelSpec
from src.parallel.mesh import STAGE, Layout
from src.system.errors import UserError

if TYPE_CHECKING:
    from src.model.pipeline import Schedule

MAX_UNROLLED = 16  # layers: to compile each by itself takes a CPU longer the more there are


@dataclass(frozen=True)
class Execution:
    """How layer groups and the update run: nothing here changes a result."""

    scan_layers: bool = True
    remat_policy: str = "none"
    remat_custom: dict[str, str] = field(default_factory=dict)  # array -> device or offload
    schedule: "Schedule | None" = None  # of pipeline stages
    has_experts: bool = False  # whose whole weights, once gathered, no policy keeps
    early_gradients: bool = False  # on TPUs: `ForwardContext.gradients_together`, `cast_matrices`
    update_in_branch: bool = False  # taken when all gradients are there, and whether it is made is known

    @property
    def kept(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the names of the arrays that a policy other than none keeps on the device, and in host memory."""
        if self.remat_policy != "custom":
            return REMAT_POLICIES[self.remat_policy]
        places = self.remat_custom.items()
        return tuple(tuple(name for name, at in places if at == place) for place in ("device", "offload"))

    @property
    def mlp_in_halves(self) -> bool:
        """Whether a wide feed-forward layer runs in halves: where gradients are early and a policy keeps none of it."""
        return self.early_gradients and self.remat_policy != "none" and "mlpwi" not in sum(self.kept, ())

    def remat(self, block: Callable, repeats: int) -> Callable:
        """Wraps a block of a pattern that runs `repeats` times, to keep for the backward pass what the policy names."""
        if self.remat_policy == "none" and not self.has_experts:
            return block
        # A loop's body is compiled by itself, so common subexpressions cannot undo the recomputation there; a loop of
        # one round is none to XLA.
        return jax.checkpoint(block, policy=self._policy(), prevent_cse=not (self.scan_layers and repeats > 1))

    def remat_turn(self, run_turn: Callable) -> Callable:
        """Wraps a pipeline stage's turn, to keep what its blocks keep, but (unless remat_policy=none) no weights."""
        if self.remat_policy == "none":
            return run_turn
        return jax.checkpoint(run_turn, policy=self._policy("decoder_layer_input"), prevent_cse=False)

    def _policy(self, *more: str) -> Callable[..., Any]:
        if self.remat_policy == "none":
            return jax.checkpoint_policies.save_anything_except_these_names("gathered_experts")
        on_device, on_host = self.kept
        on_device = {*on_device, *more} - {*on_host}
        if on_host:
            return jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=sorted(on_device),
                names_which_can_be_offloaded=list(on_host),
                offload_src="device",
                offload_dst="pinned_host",
            )
        return jax.checkpoint_policies.save_only_these_names(*sorted(on_device))


def make_schedule(mesh: Mesh, spec: ModelSpec, layout: Layout) -> "Schedule | None":
    """Returns the schedule of pipeline stages, None for one stage; raises UserError if keys and mesh do not fit."""
    if layout.mesh.shape[STAGE] > 1:
        from src.model import pipeline

        return pipeline.make_schedule(mesh, spec, layout)
    if mesh.num_pipeline_microbatches != -1 or mesh.num_pipeline_repeats not in (-1, 1):
        raise UserError(
            "num_pipeline_microbatches and num_pipeline_repeats need more than one pipeline stage: set "
            "ici_pipeline_parallelism or dcn_pipeline_parallelism"
        )
    return None


def check_rows(rows: int, layout: Layout, execution: Execution, key: str) -> None:
    """Raises UserError as `pipeline.check_rows` if there are several stages."""
    if execution.schedule:
        from src.model import pipeline

        pipeline.check_rows(rows, layout, execution.schedule, key)


def make_execution(step: Step, spec: ModelSpec, layout: Layout, schedule: "Schedule | None") -> Execution:
    """Returns how layers run by the keys of a step.

    `scan_layers=auto` unrolls them on a single CPU, where a loop would copy what its rounds keep for the backward pass.
    Several CPU devices show what accelerators would do, and scan.
    """
    scans = step.scan_layers.lower() == "true"
    if step.scan_layers == "auto":
        scans = layout.platform != "cpu" or layout.mesh.size > 1 or len(spec.layers) > MAX_UNROLLED
    # XLA for TPUs would leave a gradient that only the optimizer needs to the end of the step, and keep through the
    # backward pass what it is made of.
    early = layout.platform == "tpu"
    # Elsewhere XLA would have an offloaded state on the device all through the step; and for CPUs, which make each new
    # array by a loop of its own, it copies the old moments before it writes the new ones.
    branch = step.optimizer_memory_host_offload or layout.platform == "cpu"
    return Execution(scans, step.remat_policy, dict(step.remat_custom), schedule, spec.has_experts, early, branch)
