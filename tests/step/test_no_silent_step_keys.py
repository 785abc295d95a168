"""Every key of a model and its step changes the traced step, or is refused, or a line says that it has no effect."""

import jax
import pytest

from src.config.keys import Range
from src.config.schema import KEYS
from src.extras.idle_settings import idle_settings
from src.parallel.mesh import make_layout
from src.run.resolve_config import load
from src.step.optimizer import hparams_at
from src.step.state import init_state
from src.step.trace import plan_step, trace_train_step
from src.system.errors import UserError
from tests.tiny import TINY

# Values for keys whose types do not suggest any. A key with several is silent only if all are.
OTHER = {
    "decoder_segments": ["[{repeats: -1, pattern: [{base_mlp_dim: 32}]}]"],
    "mlp_activations": ["[gelu]"],
    "rope_max_timescale": ["500"],
    "rope_short_factor": ["[1, 1, 1, 1]"],
    "rope_long_factor": ["[1, 1, 1, 1]"],
    "quantization_exclude": ["[output]"],
    "remat_custom": ["{out_proj: device}"],
    "optimizer_rules": ['[{match: "*norm*", learning_rate_scale: 0.1}]'],
    "trainable_parameters": ["[attention.query]"],
    "lora_parameters": ["[attention.query]"],
    "max_target_length": ["32"],
}
OTHER |= {name: ["fixed,-1,1"] for name in KEYS if name.endswith("calibration_method")}
# Keys that act outside of the traced step: when JAX starts, on the host after a step, or while batches are made.
ELSEWHERE = {
    *("matmul_precision", "jax_cache_dir", "on_nonfinite", "abort_on_nan_loss", "abort_on_inf_loss"),
    *("packing", "long_documents", "batch_transform", "loss"),
}
SETUPS = {"dense": {}, "a frozen model": {"trainable_parameters": "[attention.query]"}}


def values(key):
    if key.name in OTHER or key.name in ELSEWHERE:
        return OTHER.get(key.name, [])
    if isinstance(key.default, bool):
        return [str(not key.default).lower()]
    if isinstance(key.default, int | float):
        tried = [type(key.default)(x) for x in (2, 0.5, 4)]
        return [x for x in tried if x != key.default and (not isinstance(key.allowed, Range) or key.allowed.holds(x))]
    return [choice for choice in key.allowed if choice != key.default]


def traced(config):
    """The step, then what only tells of other constants, initial values or schedules; each is computed on demand."""
    step = trace_train_step(config, jax.devices()[:1])
    yield str(step.jax_traced.jaxpr)
    yield step.schedule
    yield [hparams_at(config.step, config.run.steps, n) for n in (0, 1, 10, 19)]
    yield str(jax.make_jaxpr(lambda: init_state(step.plan))())
    yield step.jax_traced.lower().as_text()


def is_silent(config, expected):
    same = all(found == kept for found, kept in zip(traced(config), expected, strict=True))
    return same and not idle_settings(config.mesh, plan_step(config, make_layout(config.mesh, jax.devices()[:1])))


@pytest.mark.long
@pytest.mark.parametrize("setup", SETUPS)
def test_no_key_of_a_model_or_step_is_ignored_in_silence(setup, write):
    keys = {**TINY, "base_num_decoder_layers": 1, **SETUPS[setup]}
    file = str(write("tiny.yml", "".join(f"{key}: {value}\n" for key, value in keys.items())))
    plain = load([file])
    expected, silent, effects = [*traced(plain)], [], {"refused": 0, "listed": 0, "changed": 0}
    for key in KEYS.values():
        found = set()
        for value in values(key) if key.section in ("model", "step", "batch") else ():
            notes = []
            try:
                config = load([file, f"{key.name}={value}"], notes, command="src.train")
                if config[key.name] in (plain[key.name], key.default):
                    continue
                found.add("listed" if any(" no effect: " in note for note in notes) else "")
                if "" in found and not is_silent(config, expected):
                    found.add("changed")
            except UserError:
                found.add("refused")
            if "changed" in found:
                break
        effect = next((name for name in effects if name in found), "")
        if "changed" in found or effect:
            effects["changed" if "changed" in found else effect] += 1
        elif found:
            silent.append(key.name)
    assert not silent
    assert min(effects["refused"], effects["changed"]) > 10
