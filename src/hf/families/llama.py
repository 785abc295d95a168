"""Llama 1 to 3, whose names most other families have taken over."""

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS, fields.MLP_BIAS),
    tensors=(*tensors.DECODER, *tensors.FEED_FORWARD, *tensors.FEED_FORWARD_BIASES),
    defaults={"rms_norm_eps": 1e-6},
    skipped=(tensors.ROTARY_TABLES,),
    whole_heads=True,
)
