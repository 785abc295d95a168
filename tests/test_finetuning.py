"""A whole run on prompts and completions."""

import json
import math
import random

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
    runs.run_here(**keys, run_name="all", sft_train_on_completion_only=False)
    assert runs.evaluations(tmp_path / "all")[0][1] > 9 / 13 * math.log(8) - 0.1
