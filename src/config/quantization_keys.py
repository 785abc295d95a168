"""The keys of products in 8 bits."""

from src.config.keys import group, key


# fmt: off
@group
class Quantization:
    """Products in 8 bits (docs/quantization.md)"""
    quantization: str = key("",
        "of weights' products: empty, int8 (TPU v5e, v5p, v6e), fp8 (H100 and later, TPU7x) or mxfp8 (B200)",
        ("", "int8", "fp8", "mxfp8"))
    quantization_exclude: tuple = key(("output", "router", "embedding", "write_gate", "decay_gate", "shared_gate"),
        "weights whose products stay in dtype, by name; * stands for anything", example="[output, attention.*]")
    weight_quantization_calibration_method: str = key("absmax",
        "range of the codes: absmax, the largest magnitude at hand, or (fp8) fixed,-B,B")
    act_quantization_calibration_method: str = key("absmax", "the same, of activations")
    bwd_quantization_calibration_method: str = key("absmax", "the same, of gradients")
# fmt: on


CALIBRATION_METHODS = tuple(f"{of}_quantization_calibration_method" for of in ("weight", "act", "bwd"))


def fixed_bound(method: str) -> float:
    """Returns B of `fixed,-B,B`, and 0 of `absmax`; raises ValueError for another text."""
    if method == "absmax":
        return 0.0
    word, low, high = method.split(",")
    if word != "fixed" or float(low) != -float(high) or not 1e-30 <= float(high) <= 1e30:
        raise ValueError(method)
    return float(high)
