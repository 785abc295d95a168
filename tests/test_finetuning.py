"""A whole run on prompts and completions."""

import json
import math
import random

import pytest

from src.extras.evaluation import evaluate
from tests import runs


def test_a_run_learns_completions_and_not_prompts(tmp_path, capsys):
    """Completions follow from the prompt's last letter, so their loss can go to zero; a prompt's letters are drawn."""
    draw = random.Random(0)
    letters = "abcdefgh"
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for _ in range(400):
            prompt = "".join(draw.choices(letters, k=9))
            file.write(json.dumps({"prompt": prompt, "completion": f"={prompt[-1].upper()}."}) + "\n")
    keys = {"base_output_directory": tmp_path, "dataset_path": tmp_path / "pairs.jsonl", "use_sft": True}
    keys |= {"steps": 100, "eval_interval": 100, "checkpoint_period": 100}
    runs.run_here(**keys)
    assert " conversations" in capsys.readouterr().out
    assert runs.evaluations(tmp_path / "run")[0][1] < 0.1
    # All tokens: 9 letters of the 13 targets of a pair are drawn from 8, and no model can do better than their entropy.
    runs.run_here(**{**keys, "steps": 50, "eval_interval": 50}, run_name="all", sft_train_on_completion_only=False)
    assert runs.evaluations(tmp_path / "all")[0][1] > 9 / 13 * math.log(8) - 0.1


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """Pairs of 5 to 80 tokens, of which a row holds 64."""
    draw, file = random.Random(1), tmp_path_factory.mktemp("data") / "pairs.jsonl"
    sizes = [80, *(draw.randint(5, 60) for _ in range(70)), 70]
    pairs = ({"prompt": "".join(draw.choices("ab", k=size - 4)), "completion": "yes"} for size in sizes)
    file.write_text("\n".join(map(json.dumps, pairs)))
    return file


def test_an_evaluation_is_the_same_packed_and_a_conversation_a_row(varied, tmp_path, capsys):
    keys = {"base_output_directory": tmp_path, "dataset_path": varied, "use_sft": True}
    runs.run_here(**keys, steps=12, checkpoint_period=12)
    printed = capsys.readouterr().out
    assert "packed, cutting none that fits a row" in printed
    assert "2 of 72 looked at are longer than a row of 64 and cut; what the assistant says counts" in printed
    # An epoch has about 40 rows, of which 2 end within a pair.
    cut = [line["conversations_cut"] for line in runs.lines(tmp_path / "run")]
    assert sum(cut) in (4, 5, 6)
    losses = [
        evaluate.main(
            runs.arguments(
                **{**keys, "eval_dataset_path": varied, "load_parameters_path": tmp_path / "run", "packing": packing}
            )
        )["eval_loss"]
        for packing in ("true", "false")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
