"""How many tiles the loss has where nobody says."""

import jax
import pytest

from src.model import execution
from src.parallel.mesh import make_layout
from tests.tiny import LENGTH, VOCAB, load, make

# Of a tiny model's logits and their gradient, float32, of one row on each device.
ROW = 2 * LENGTH * VOCAB * 4


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
    monkeypatch.setattr(execution, "MAX_LOGITS", most)
    config = load(per_device_batch_size=2, **keys)
    layout = make_layout(config.mesh, jax.devices()[:4])
    assert execution.vocab_tiles(config.step, config.batch, config.vocab_size, layout) == tiles


def test_a_step_is_planned_with_them(monkeypatch):
    assert make()[1].step.num_vocab_tiling == 1
    monkeypatch.setattr(execution, "MAX_LOGITS", 1)
    assert make()[1].step.num_vocab_tiling == LENGTH
