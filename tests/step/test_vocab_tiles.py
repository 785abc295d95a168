"""How many tiles the loss has where nobody says, and that they change nothing but memory."""

import jax
import pytest

from src.model import lookup, vocab_tiles
from src.model.spec import VOCAB_MULTIPLE
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.step.loss import count_tokens, next_token_loss, objective
from src.step.optimizer import hparams_at
from src.step.state import abstract_batch, abstract_state
from src.step.train_step import compile_steps
from tests.tiny import (
    BASE,
    LENGTH,
    VOCAB,
    abstract_layout,
    assert_close,
    load,
    make,
    packed_rows,
    random_weights,
    spec_of,
)

# Of a tiny model's logits and their gradient, float32, of one row on each device.
PADDED = -(-VOCAB // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
ROW = 2 * LENGTH * PADDED * 4


@pytest.mark.parametrize(
    ("most", "keys", "tiles"),
    [
        (2 * ROW, {}, 1),
        (2 * ROW - 1, {}, 2),
        (ROW / 2, {}, 4),
        (ROW / 2, {"ici_tensor_parallelism": 2, "vocab_size": VOCAB}, 4),  # twice the rows, half of the vocabulary
        (ROW / 2, {"num_vocab_tiling": 2}, 2),
        (1, {}, LENGTH),
        (1, {"max_target_length": 12}, 4),
        (1, {"ici_context_parallelism": 4}, LENGTH // 4),
    ],
)
def test_the_fewest_tiles_that_fit_and_divide_the_rows(most, keys, tiles, monkeypatch):
    monkeypatch.setattr(vocab_tiles, "MAX_LOGITS", most)
    config = load(per_device_batch_size=2, **keys)
    layout = make_layout(config.mesh, jax.devices()[:4])
    assert vocab_tiles.vocab_tiles(config.step, config.batch, spec_of(config), layout) == tiles


def test_a_step_is_planned_with_them(monkeypatch):
    assert make()[1].step.num_vocab_tiling == 1
    monkeypatch.setattr(vocab_tiles, "MAX_LOGITS", 1)
    assert make()[1].step.num_vocab_tiling == LENGTH


@pytest.mark.parametrize(
    ("name", "devices", "keys", "tiles"),
    [
        ("gemma2-9b", 256, {"per_device_batch_size": 1, "max_target_length": 4096}, 8),
        ("llama3.1-70b", 128, {"per_device_batch_size": 2, "max_target_length": 8192}, 2),
        ("mixtral-8x7b", 64, {"per_device_batch_size": 4, "max_target_length": 4096}, 1),
        ("deepseek2-16b", 32, {"per_device_batch_size": 2, "max_target_length": 4096}, 1),
        ("llama3.1-8b", 256, {"per_device_batch_size": 2, "max_target_length": 8192}, 1),
        ("llama2-7b", 64, {"per_device_batch_size": 4, "max_target_length": 4096}, 1),
        ("qwen3-30b-a3b", 64, {"per_device_batch_size": 2, "max_target_length": 4096}, 1),
        ("gemma3-1b", 16, {"per_device_batch_size": 0.0625, "max_target_length": 1024}, 1),  # small in any case
    ],
)
def test_a_loss_much_larger_than_a_block_is_cut(name, devices, keys, tiles):
    config = resolve_config.load([BASE, f"model_name={name}", *(f"{key}={it}" for key, it in keys.items())])
    layout = abstract_layout(config, fsdp=devices)
    assert vocab_tiles.vocab_tiles(config.step, config.batch, spec_of(config), layout) == tiles


def objective_and_gradients(plan, batch):
    """With random weights."""
    weights, counts = plan.split(random_weights(plan)), count_tokens(batch, plan)

    @jax.jit
    @jax.value_and_grad
    def value(trainable):
        return objective(trainable, weights, counts, batch, plan, next_token_loss)[0]

    return jax.device_get(value(weights.trainable))


HEADS = [
    {"logits_via_embedding": "true", "final_logits_soft_cap": 5.0},
    {"logits_bias": "true", "logits_scaling": 2.0, "mtp_num_layers": 1},
]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("mesh", [{}, {"ici_tensor_parallelism": 2}, {"ici_context_parallelism": 2}], ids=str)
def test_loss_and_gradients_are_those_of_one_tile(head, mesh):
    """Tiles are of the vocabulary, its padding among them, or of the sequence where devices share the vocabulary."""
    batch, found = packed_rows(0), []
    for tiles in (1, 4):
        _, plan = make(8, num_vocab_tiling=tiles, z_loss_multiplier=0.1, **head, **mesh)
        found.append(objective_and_gradients(plan, batch))
    assert_close(*found, 1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_tiles_of_the_vocabulary_hold_one_part_of_the_logits_and_weights(tied, monkeypatch):
    """By the arrays of the program: of 4 tiles none has a vocabulary of more than a quarter, but sharded."""
    monkeypatch.setattr(lookup, "LANES", 4)
    config, plan = make(8, num_vocab_tiling=4, logits_via_embedding=tied, vocab_size=1024, per_device_batch_size=1)
    state, batch = abstract_state(plan), abstract_batch(plan, 8, LENGTH)
    train, _ = compile_steps(plan, state)
    text = train.lower(state, batch, hparams_at(config.step, config.run.steps, 0)).compile().as_text()
    D = config.model.base_emb_dim
    whole = {f"f32[{shape}]" for shape in (f"1,{LENGTH},1024", f"1024,{D}", f"{D},1024")}
    assert f"f32[1,{LENGTH},256]" in text
    assert not {shape for shape in whole if shape in text}
