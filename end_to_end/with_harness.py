"""Measures a run's exported folder with lm-evaluation-harness's own model, and compares it with src.evaluate's results.

python -m end_to_end.with_harness FOLDER     the folder that evaluation.sh fills: run, hf, tasks, tasks.json
"""

import json
import math
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from src.data.tokenizer import make_tokenizer
from src.extras.evaluation.answers import Answers
from src.extras.generation.loaded_model import load_model
from src.run.resolve_config import load

TASKS = ["my_choice", "my_texts", "my_bytes"]


def main(out: Path) -> None:
    """Prints both sides' metrics; raises AssertionError if metrics, log-probabilities or texts differ."""
    theirs = HFLM(pretrained=str(out / "hf"), dtype="float32", device="cpu", max_length=128, batch_size=8)
    manager = TaskManager(include_path=str(out / "tasks"), include_defaults=False)
    expected = simple_evaluate(theirs, tasks=TASKS, num_fewshot=2, task_manager=manager)
    found = json.loads((out / "tasks.json").read_text())["results"]
    for task in TASKS:
        for name, value in expected["results"][task].items():
            if not isinstance(value, str):
                print(task, name, found[task][name], value)
                assert math.isclose(found[task][name], value, rel_tol=1e-5, abs_tol=1e-9), name

    config = load([str(out / "run")], uses_weights=True)
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    assert tokenizer
    sections = config.evaluation, config.batch, config.decoding
    ours = Answers(*sections, *load_model(config, tokenizer), tokenizer)
    rows = [sample["arguments"] for task in TASKS for sample in expected["samples"][task]]
    pairs = [tuple(pair) for row in rows[:24] for pair in row] + [("", "é and é"), ("a ", "b" * 60), ("c" * 200, " d")]
    wanted = theirs.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    answered = ours.log_likelihoods(pairs)
    worst = max(abs(a - b) for (a, _), (b, _) in zip(answered, wanted, strict=True))
    assert [greedy for _, greedy in answered] == [greedy for _, greedy in wanted]
    print(f"log-probabilities of {len(pairs)} continuations: at most {worst:.2g} apart")
    assert worst <= 1e-4
    requests = [tuple(row[0]) for row in rows[24:48]]
    texts = theirs.generate_until([Instance("generate_until", {}, request, 0) for request in requests])
    assert ours.completions(requests) == texts
    print(f"{len(requests)} texts are equal, such as {max(texts, key=len)!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
