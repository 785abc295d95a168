"""The keys of a training step: the section `config.step`."""

import dataclasses
from collections.abc import Mapping

from src.config.command_keys import Preferences, Quantization
from src.config.keys import BELOW_1, DTYPES, FROM_0, FROM_1, FROM_2, POSITIVE, SEED, group, key, path
from src.config.optimizer_keys import OptimizerKeys

_QKV = ("query_proj", "key_proj", "value_proj")
_PRODUCTS = (*_QKV, "out_proj", "mlpwi", "mlpwo")  # outputs of a block's matmuls with weights
REMAT_ARRAYS = ("decoder_layer_input", *_QKV, "context", "out_proj", "mlpwi", "mlpwo")
# Policy, except `none` and `custom` -> arrays that it saves for the backward pass: on the device, in host memory.
REMAT_POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "minimal": (_PRODUCTS, ()),
    "minimal_with_context": ((*_PRODUCTS, "context"), ()),
    "save_qkv_proj": (_QKV, ()),
    "save_out_proj": (("out_proj",), ()),
    "qkv_proj_offloaded": ((), _QKV),
    "minimal_offloaded": ((), _PRODUCTS),
}
REMAT_COMMENT = (
    """\
What a block saves for the backward pass, which recomputes the rest. Arrays: decoder_layer_input (the block's
input), query_proj, key_proj, value_proj, context (attention's output before its projection), out_proj
(after it), mlpwi (feed-forward, each factor's matmul), mlpwo (its output). Every policy saves decoder_layer_input
on the device unless custom offloads it. Arrays that no derivative needs are not saved. minimal recomputes attention;
minimal_with_context does so only for attention=dot_product.
  none                 every intermediate; only GPUs recompute activation functions
"""
    + "".join(
        f"  {policy:20} {' '.join(kept + sent) or 'only decoder_layer_input'}{', in host memory' * bool(sent)}\n"
        for policy, (kept, sent) in REMAT_POLICIES.items()
    )
    + "  custom               the arrays that remat_custom names"
)

# fmt: off

@group
class Numerics:
    """Numerics"""
    dtype: str = key("bfloat16", "of activations and matmuls: bfloat16 or float32", DTYPES)
    weight_dtype: str = key("float32", "of weights and of Adam's second moment", DTYPES, resume_invariant=True)
    matmul_precision: str = key("default", "default, high or highest; TPU and GPU round float32 unless highest",
        ("default", "high", "highest"))
    attention: str = key("autoselected", "autoselected, dot_product, blocked, flash (TPU), cudnn_flash (NVIDIA GPU)",
        ("autoselected", "dot_product", "blocked", "flash", "cudnn_flash"))
    num_vocab_tiling: int = key(0,
        "loss tiles, one at a time: of the vocabulary (sharded: the sequence); 0: by size",
        FROM_0, 2**24)


@group
class Compilation:
    """Compilation and memory"""
    scan_layers: str = key("auto", "true: one body per pattern; false: unrolled; auto: false for few layers on one CPU",
        ("auto", "true", "false", "True", "False"))
    remat_policy: str = key("full", "one of the above", ("none", *REMAT_POLICIES, "custom"), above=REMAT_COMMENT)
    remat_custom: Mapping = key({}, "custom: {array: device or offload} for each array to save")
    jax_cache_dir: str = path("~/.cache/mintext",
        "folder where compiled programs are kept between runs; empty: not kept")


@group
class Objective:
    """Loss, gradients and safeguards"""
    shard_optimizer_over_data: bool = key(False, "shard the optimizer state over replicas of the weights too (ZeRO-1)")
    optimizer_memory_host_offload: bool = key(False, "keep the optimizer state in host memory except during the update")
    gradient_clipping_threshold: float = key(1.0,
        "maximum global norm of the gradient, scaled down to it; 0: off", FROM_0)
    gradient_accumulation_steps: int = key(1, "micro-batches per step, each of per_device_batch_size", FROM_1, 2**20)
    loss: str = key("", "module:function(model, batch, plan) -> loss to minimise; empty: next_token_loss",
        resume_invariant=True)
    z_loss_multiplier: float = key(0.0, "weight of the squared log-sum-exp of the logits (PaLM, section 5)", FROM_0)
    load_balance_loss_weight: float = key(0.0,
        "weight of the load-balance loss, 1 per layer if even (Switch Transformer, sec 2.2)", FROM_0)
    router_z_loss_weight: float = key(0.0, "weight of the routers' squared log-sum-exp (ST-MoE, equation 5)", FROM_0)
    routed_bias_update_rate: float = key(0.001, "routed_bias: change of a bias per step, towards even loads", FROM_0)
    mtp_loss_scaling_factor: float = key(0.1,
        "mtp_num_layers: weight of the mean loss of the extra predictions", FROM_0)
    on_nonfinite: str = key("stop",
        "on a nonfinite loss or gradient: stop, or skip the update (ten in a row stop too)", ("stop", "skip"))
    ema_decay: float = key(0.0, "decay per step of an exponential moving average of the weights (EMA); 0: none",
        BELOW_1, resume_invariant=True)
    abort_on_nan_loss: bool = key(True, "on_nonfinite=stop: stop if the loss is NaN; false: skip its update")
    abort_on_inf_loss: bool = key(True, "on_nonfinite=stop: stop if the loss is infinite; false: skip its update")
    skip_step_on_spikes: bool = key(False,
        "skip an update if its loss or gradient norm is far above recent ones", resume_invariant=True)
    skip_step_interval: int = key(128, "skip_step_on_spikes: number of recent steps to compare with", FROM_2, 2**16,
        resume_invariant=True)
    skip_step_scaling_factor: float = key(6.0,
        "skip_step_on_spikes: skip above their mean + this many standard deviations", POSITIVE)
    log_internals: int = key(0,
        "steps between recorded norms of weights, gradients, updates, layer outputs; 0: off", FROM_0)
    init_weights_seed: int = key(0, "seed of the weights and of dropout", SEED)


@group
class Trainable:
    """Finetuning: the weights"""
    trainable_parameters: tuple = key((),
        "weights to train (attention.query, segments.0.*); []: all, or none with lora_rank",
        example="[attention.*]")
    lora_rank: int = key(0, "rank of the adapters trained instead of the weights (LoRA); 0: none", FROM_0, 2**16)
    lora_alpha: float = key(16.0, "an adapter's output is scaled by lora_alpha / lora_rank", POSITIVE)
    lora_parameters: tuple = key(("attention.query", "attention.value"),
        "names of weights with an adapter; * stands for anything", example="[attention.query]")
# fmt: on


@dataclasses.dataclass(frozen=True)
class Step(Numerics, Quantization, Compilation, OptimizerKeys, Objective, Trainable, Preferences):
    """How a step computes, what it saves, what it minimises, with which optimizer, and for which weights."""
