"""The optimizers and learning-rate schedules, each declared in one table, and the keys that they read."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from src.config.keys import BELOW_1, DTYPES, FROM_0, FROM_1_OR_UNSET, POSITIVE, SHARE, choice, group, key

ADAM = ("adam_b1", "adam_b2", "adam_eps", "mu_dtype")
FINAL, DECAY = "learning_rate_final_fraction", "wsd_decay_steps_fraction"


class OptimizerType(NamedTuple):
    """Declares a value of `opt_type`: how it turns gradients into updates, and the keys that it reads."""

    note: str  # its line in base.yml
    scaling: str = ""  # module:function(chosen, inputs), which `make_optimizer` calls; "": the gradient
    reads: tuple[str, ...] = ()  # keys that only some optimizers read
    hidden_only: bool = False  # it updates matrices in layers, and adamw all other weights
    waits: bool = False  # its first step only prepares, and moves no weight


# Checkpoints have the optimizers' states in the reverse of this order, which must not change: add new ones at the end.
OPTIMIZERS = {
    "adamw": OptimizerType(
        "Adam with decoupled weight decay", "src.step.optimizer:adamw", reads=(*ADAM, "adam_clip_threshold")
    ),
    "adafactor": OptimizerType(
        "row and column means of a matrix's second moment; learning_rate is relative to a weight's size",
        "src.step.adafactor:adafactor",
    ),
    "muon": OptimizerType(
        "orthogonal updates of the matrices in layers; adamw for all other weights",
        "src.step.muon:muon",
        reads=(*ADAM, "muon_beta"),
        hidden_only=True,
    ),
    "sgd": OptimizerType("gradients without moments"),
}


class Schedule(NamedTuple):
    """Declares a value of `lr_schedule_type`: the shape of the learning rate, and the keys that it reads."""

    note: str  # its line in base.yml
    # (keys, step, warm-up steps, schedule steps) -> learning rate after the warm-up, as a fraction of its peak
    share: Callable[["OptimizerKeys", int, int, int], float]
    reads: tuple[str, ...] = (FINAL,)  # keys that only some schedules read


def _cosine(keys: "OptimizerKeys", step: int, warmup: int, total: int) -> float:
    """Half a cosine from the peak to its final fraction: SGDR without restarts (Loshchilov and Hutter 2017, eq. 5)."""
    final, progress = keys.learning_rate_final_fraction, (step - warmup) / max(total - warmup, 1)
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _exponential(keys: "OptimizerKeys", step: int, warmup: int, total: int) -> float:
    """Decay from the peak to its final fraction, by a constant factor per step."""
    return keys.learning_rate_final_fraction ** ((step - warmup) / max(total - warmup, 1))


def _wsd(keys: "OptimizerKeys", step: int, warmup: int, total: int) -> float:
    """The peak, then a linear decay to the final fraction over the last `wsd_decay_steps_fraction` of the steps.

    From Hägele et al. 2024, arXiv 2405.18392.
    """
    final, decay = keys.learning_rate_final_fraction, round(keys.wsd_decay_steps_fraction * total)
    return min(1.0, final + (1.0 - final) * (total - step) / max(decay, 1))


SCHEDULES = {
    "cosine": Schedule("half a cosine", _cosine),
    "exponential": Schedule("a constant factor per step", _exponential),
    "wsd": Schedule("the peak, then a linear decay", _wsd, reads=(FINAL, DECAY)),
}


def reading(table: Mapping[str, Any], key: str) -> list[str]:
    """Lists the names of the optimizers or schedules in `table` that read a key."""
    return [name for name, it in table.items() if key in it.reads]


# fmt: off
@group
class OptimizerKeys:
    """Optimizer"""
    opt_type: str = choice("adamw", "Optimizers", OPTIMIZERS, resume_invariant=True)
    learning_rate: float = key(3e-4, "peak learning rate", POSITIVE, 2**120)
    lr_schedule_type: str = choice("cosine", "The learning rate after its warm-up", SCHEDULES)
    learning_rate_schedule_steps: int = key(-1,
        "length of the schedule, after which the rate is 0; -1: steps", FROM_1_OR_UNSET)
    warmup_steps_fraction: float = key(0.1, "share of the schedule: linear warm-up from 0 to learning_rate", SHARE)
    learning_rate_final_fraction: float = key(0.1,
        "learning rate at the schedule's end, as a fraction of learning_rate", SHARE)
    wsd_decay_steps_fraction: float = key(0.1,
        f"{', '.join(reading(SCHEDULES, DECAY))}: share of the schedule with linear decay, at its end", SHARE)
    optimizer_rules: tuple = key((),
        'first match wins: [{match: "*norm*", learning_rate_scale: 0.1, weight_decay: 0}]',
        resume_invariant=True)
    adam_b1: float = key(0.9, "decay of the first moment", BELOW_1)
    adam_b2: float = key(0.95, "decay of the second moment", BELOW_1)
    adam_eps: float = key(1e-8, "added to the square root of the second moment", POSITIVE)
    adam_weight_decay: float = key(0.1, "decoupled; not applied to norms and biases", FROM_0)
    adam_clip_threshold: float = key(0.0,
        "maximum root mean square of adamw's update of a matrix or vector (Pax); not within muon; 0: off", FROM_0)
    mup_base_emb_dim: int = key(0,
        "width that learning_rate was tuned at, to use it at other widths (muP); 0: off", FROM_0,
        resume_invariant=True)
    muon_beta: float = key(0.95, "muon: decay of the momentum", BELOW_1)
    mu_dtype: str = key("", "of the first moment; empty: as the weights, or float32 with lora_rank", ("", *DTYPES),
        resume_invariant=True)
# fmt: on


def learning_rate(keys: OptimizerKeys, steps: int, step: int) -> float:
    """Computes the learning rate of update number `step`, counted from 0, in a run of `steps` updates.

    It rises linearly to `learning_rate` during `warmup_steps_fraction` of `learning_rate_schedule_steps` (-1: `steps`),
    follows the schedule to `learning_rate_final_fraction` of that peak, and is 0 afterwards.
    """
    # Not by optax: its schedules compute in float32 on a device, which rounds differently, and the loop would wait.
    total = steps if keys.learning_rate_schedule_steps == -1 else keys.learning_rate_schedule_steps
    warmup = round(keys.warmup_steps_fraction * total)
    if step >= total:
        return 0.0
    if step < warmup:
        return keys.learning_rate * (step + 1) / warmup
    return keys.learning_rate * SCHEDULES[keys.lr_schedule_type].share(keys, step, warmup, total)


def check_schedule(config: Any) -> Iterator[str]:
    """Checks the keys of the learning rate against each other; yields problems."""
    step = config.step
    if config.run.steps == -1 and step.learning_rate_schedule_steps == -1:
        yield "steps=-1 takes its value from learning_rate_schedule_steps, which is -1 too: set one of them"
    if step.lr_schedule_type == "exponential" and step.learning_rate_final_fraction == 0:
        yield "lr_schedule_type=exponential never reaches 0: set learning_rate_final_fraction above 0, such as 0.1"
    warmup, decay = step.warmup_steps_fraction, step.wsd_decay_steps_fraction
    if step.lr_schedule_type in reading(SCHEDULES, DECAY) and warmup + decay > 1:
        yield f"warmup_steps_fraction={warmup} and wsd_decay_steps_fraction={decay} leave no room: their sum exceeds 1"
