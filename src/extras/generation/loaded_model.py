"""Loads or plans a model for use without training, as in src.decode and src.evaluate."""

import jax

from src.checkpoint.load_weights import check_tokenizer, check_vocabulary, identity, load_weights
from src.checkpoint.resume import all_weights
from src.config.schema import Config, keys_of
from src.config.yaml import dump
from src.data.types import Tokenizer
from src.model.params import Weights
from src.parallel.mesh import MeshLayout, make_layout
from src.parallel.slices import check_hardware
from src.step.plan import StepPlan
from src.step.state import abstract_state
from src.step.trace import plan_step
from src.system.errors import UserError, say


def load_model(config: Config, tokenizer: Tokenizer | None) -> tuple[StepPlan, Weights]:
    """Loads the config's model with weights from `load_parameters_path`, adapters merged; prints what it loaded.

    Raises UserError if `load_parameters_path` is empty, if its weights or their vocabulary don't fit, or if they were
    trained with another tokenizer; also as `check_hardware`, `make_layout`, `inference_plan` and `load_weights` do.
    """
    if not config.checkpoint.load_parameters_path:
        raise UserError(
            "load_parameters_path is empty: give the weights to use: a run's folder, a checkpoint or a Hugging Face "
            "folder. (With a run's folder, runs/NAME, in place of the YAML file, the command uses the run's weights.)"
        )
    check_hardware(config.run.hardware)
    layout = make_layout(config.mesh, jax.devices())
    plan = inference_plan(config, layout)
    tree = all_weights(abstract_state(plan))
    weights, meta, messages = load_weights(config.checkpoint.load_parameters_path, tree, config.checkpoint.load_ema)
    check_vocabulary(config.model.vocab_size, meta)
    check_tokenizer(config.run.accept_changes, meta, tokenizer)
    say(messages)
    return plan, plan.split(weights)


def model_fingerprint(config: Config) -> dict[str, str]:
    """Identifies the model, its weights and its precision: with the tokenized text, they determine log-probabilities.

    It is saved with computed results, so that they are not continued with another model. Raises as `identity` does.
    """
    precision = "dtype", "weight_dtype", "matmul_precision", "quantization"
    keys = {key: dump(config[key]) for key in (*keys_of("model"), "load_ema", *precision)}
    return {**keys, "weights": identity(config.checkpoint.load_parameters_path)}


def inference_plan(config: Config, layout: MeshLayout) -> StepPlan:
    """Plans the config's model without adapters, frozen weights or optimizer rules; raises as `plan_step` does."""
    return plan_step(config.replace(lora_rank=0, trainable_parameters=[], optimizer_rules=[]), layout)
