"""Loads a model for use without training: for decode.py and evaluate.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from src.checkpoint.load_weights import load_weights
from src.checkpoint.resume import all_weights, check_tokenizer, check_vocabulary
from src.config.schema import Config
from src.data.types import Tokenizer
from src.errors import UserError
from src.model.params import Weights
from src.model.spec import model_spec
from src.parallel.mesh import Layout, check_hardware, make_layout
from src.step.plan import StepPlan, make_plan
from src.step.state import abstract_state


@dataclass(frozen=True)
class LoadedModel:
    """Holds a model with its weights and the tokenizer of its texts."""

    plan: StepPlan
    weights: Weights
    tokenizer: Tokenizer | None
    messages: list[str]


def load_model(config: Config, tokenizer: Tokenizer | None) -> LoadedModel:
    """Loads the model that the config describes with the weights of `load_parameters_path`, merging adapters.

    Args:
        config: the command's.
        tokenizer: of the model's texts; None: it has none.

    Raises:
        UserError: there are no such weights, or they are another model's or another tokenizer's.
    """
    if not config.load_parameters_path:
        raise UserError(
            "load_parameters_path says whose weights to use: a run's folder, a checkpoint, a Hugging Face "
            "folder. (A run's folder in place of the YAML file brings its own, as in python -m src.decode runs/NAME)"
        )
    check_hardware(config.run.hardware)
    layout = make_layout(config.mesh, jax.devices())
    plan = inference_plan(config, layout, config.max_target_length, packed=config.packing)
    weights, meta, messages = load_weights(config.load_parameters_path, all_weights(abstract_state(plan)))
    check_vocabulary(config, meta)
    check_tokenizer(config, meta, tokenizer)
    return LoadedModel(plan, plan.split(weights), tokenizer, messages)


def inference_plan(config: Mapping[str, Any], layout: Layout, length: int, packed: bool) -> StepPlan:
    """Returns the plan of the config's model on rows of `length` tokens, without adapters or frozen weights.

    Raises:
        UserError: as `make_plan` does, or rows are longer than the model's table of positions.
    """
    spec = model_spec(config.model, config.step, config.batch.max_target_length)
    if 0 < spec.trainable_position_size < length:
        raise UserError(f"rows of {length} tokens are longer than the model's {spec.trainable_position_size} positions")
    config = config.replace(max_target_length=length, packing=packed, lora_rank=0, trainable_parameters=[])
    return make_plan(config, spec, layout)
