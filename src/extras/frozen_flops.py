"""Counts the operations of a step that trains only some weights, or adapters beside frozen weights."""

from typing import Any

from src.model.flops import FlopsPerToken, block_weights, flops_per_token
from src.model.params import by_path
from src.step.plan import StepPlan


def trained_flops(plan: StepPlan, length: int) -> FlopsPerToken:
    """Counts as `flops_per_token` does, without the gradients of frozen weights, and with the adapters' matmuls.

    A frozen weight takes 4 operations per element instead of 6: its output, and the gradient of its input. The latter
    is counted in all layers, though none below the first trained weight needs it.
    """
    whole, weights = flops_per_token(plan.spec, length), plan.split(plan.shapes)
    added = in_layers = 0.0
    for per_element, tree in ((-2, weights.frozen), (6, weights.trainable.get("lora", {}))):
        for path, leaf in by_path(tree).items():
            of_weight = path[:-1] if per_element > 0 else path  # adapters are named after their weight
            operations = per_element * leaf.size * _uses(plan, of_weight)
            added += operations
            in_layers += operations * (path[0] in ("segments", "mtp") and path[-1] != "projection")
    return FlopsPerToken(whole.causal + added, whole.palm + added, whole.layers + in_layers)


def _uses(plan: StepPlan, path: tuple[Any, ...]) -> float:
    """How often a token's matmuls use each element of a weight, or of its adapter; 0 if none does."""
    spec = plan.spec
    match path:
        case ("segments", group, position, *within):
            found = spec.layer_groups[group]
            layer, times = found.pattern[position], found.repeats if found.shared else 1
        case ("mtp", _, "block", *within):
            layer, times = spec.layers[-1], 1
        case ("mtp", _, "projection"):
            return 1
        case ("output",) | ("embedding",):
            used = path[0] == "output" or spec.logits_via_embedding
            return used * (1 + spec.mtp_num_layers) * spec.vocab_size / spec.padded_vocab_size
        case _:
            return 0
    shares = (each.used / each.size for each in block_weights(layer, spec) if each.path == tuple(within) and each.input)
    return times * next(shares, 0)
