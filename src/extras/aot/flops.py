"""Counts what the backward pass recomputes, and what matmuls with chosen weights read and write."""

from collections.abc import Collection

from src.model.attention_kernels.scores import CONTEXT
from src.model.execution import Execution
from src.model.flops import FlopsPerToken, all_layers, block_weights, head_elements, layer_matmuls, matmul_flops
from src.model.spec import ModelSpec


def layer_share(spec: ModelSpec, paths: Collection[tuple[str, ...]]) -> float:
    """Share of the layers' weight matmuls that use the weights with these paths in their block."""
    products = list(layer_matmuls(spec))
    return sum(used for path, used in products if path in paths) / sum(used for _, used in products)


def product_widths(spec: ModelSpec, paths: Collection[tuple[str, ...]]) -> tuple[float, float]:
    """Counts the numbers per token that the layers' matmuls with these weights read, and that they write.

    An input that several weights of a block's part share, such as attention's query, key and value, counts once.
    """
    inputs = outputs = 0.0
    for layer, count in all_layers(spec).items():
        weights = [each for each in block_weights(layer, spec) if each.path in paths]
        inputs += count * sum({(each.path[0], each.input): each.taken for each in weights}.values())
        outputs += count * sum(each.used / each.summed for each in weights)
    return inputs, outputs


def recomputed_flops(
    spec: ModelSpec, length: int, execution: Execution, vocab_tiles: int, kernel: str
) -> FlopsPerToken:
    """Counts the matmuls per token that the backward pass recomputes, in addition to `flops_per_token`.

    A block recomputes the arrays that its derivatives need and its policy does not save; with more than one tile of the
    loss, the logits are recomputed too. Attention's two matmuls are recomputed unless the policy saves what the kernel
    needs, which for dot_product includes arrays without a name; scores that other kernels recompute internally, in
    their backward pass, are not counted.
    """
    elements = head_elements(spec) if vocab_tiles > 1 else 0
    if execution.remat_policy == "none":
        return FlopsPerToken(2.0 * elements, 2.0 * elements)
    kept = {name for names in execution.kept for name in names}
    if "decoder_layer_input" not in kept:
        elements += spec.mtp_num_layers * 2 * spec.emb_dim**2
    in_layers = 0.0
    for layer, count in all_layers(spec).items():
        products = [weight for weight in block_weights(layer, spec) if weight.input and not weight.ends_block]
        again = [weight for weight in products if not weight.spared_by or not kept.issuperset(weight.spared_by)]
        in_layers += count * sum(weight.used for weight in again)
    attends = kernel == "dot_product" or CONTEXT not in kept
    return matmul_flops(1, elements, in_layers, spec, length, attends)
