"""Preference pairs: both forms that TRL writes, what of them counts, how a batch has them, and what is refused."""

import json

import numpy as np
import pytest

from src.data.packing import empty_batch, fill_row
from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.preferences.pairs import PairRows, PairSource, pair_batch, pair_keys
from src.run import resolve_config
from src.system.errors import UserError
from tests.data.test_conversations import CHAT_ML, QWEN, chat_tokenizer, learned_text  # noqa: F401
from tests.tiny import BASE

HI = {"role": "user", "content": "hi"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
EARLIER = [HI, {"role": "assistant", "content": "well"}, {"role": "user", "content": "so?"}]
TEXTS = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}


@pytest.fixture
def rows_of(write):
    """Records and a tokenizer -> the rows of a file of them."""

    def make(*records, tokenizer=None, length=64):
        lines = "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)
        config = resolve_config.load([BASE, f"max_target_length={length}"])
        inputs = InputSpec.of(config, tokenizer or ByteTokenizer())
        return PairRows(inputs, PairSource(str(write("pairs.jsonl", lines)), "dataset_path", inputs))

    return make


def test_texts_are_the_prompt_an_answer_and_the_end(rows_of):
    chosen, rejected = rows_of(TEXTS).row(0)
    tokenizer = ByteTokenizer()
    for document, text in ((chosen, "2 + 2 = 4"), (rejected, "2 + 2 = 5")):
        assert document.ids.tolist() == tokenizer.encode(text).tolist()
        assert document.loss_mask.tolist() == [False] * 8 + [True] * 3


# An explicit prompt, the prompt at the head of both lists, and UltraFeedback's: both, the prompt as a text.
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": EARLIER, "chosen": [YES], "rejected": [NO]},
        {"chosen": [*EARLIER, YES], "rejected": [*EARLIER, NO]},
        {"prompt": "hi", "chosen": [*EARLIER, YES], "rejected": [*EARLIER, NO]},
    ],
)
@pytest.mark.parametrize("template", [CHAT_ML, QWEN])
def test_of_messages_the_last_turn_alone_counts(rows_of, chat_tokenizer, template, record):  # noqa: F811
    tokenizer, folder = chat_tokenizer(template)
    learned = [learned_text(folder, each) for each in rows_of(record, tokenizer=tokenizer, length=400).row(0)]
    thought = "<think></think>" if template == QWEN else ""
    assert learned == [[f"{thought}yes<|end|>"], [f"{thought}no<|end|>"]]


def test_a_batch_counts_a_pair_once_and_finds_its_reference(rows_of):
    rows = rows_of(TEXTS, {**TEXTS, "chosen": " four"})
    batch = empty_batch(3, 64)
    for row in (0, 1):
        fill_row(batch, row, ((document, 0, len(document.ids) - 1) for document in rows.row(row)))
    keys = pair_keys(batch)
    assert len({*keys}) == 3
    assert keys[2] == ""
    filled = pair_batch(batch, {keys[1]: [-3.0, -4.0], keys[0]: [-1.0, -2.0]})
    assert filled["reference"].tolist() == [[-1, -2], [-3, -4], [0, 0]]
    assert filled["loss_mask"].sum(axis=1).tolist() == [1, 1, 0]
    assert filled["answer_mask"].sum(axis=1).tolist() == [6, 9, 0]
    with pytest.raises(UserError, match="1 pairs of a batch were not in the data that this run began with"):
        pair_batch(batch, {keys[0]: [0.0, 0.0]})
    # All that a log-probability depends on but the model is in a key: also which of the answers is preferred.
    swapped = rows_of({**TEXTS, "chosen": TEXTS["rejected"], "rejected": TEXTS["chosen"]})
    other = empty_batch(1, 128)
    fill_row(other, 0, ((document, 0, len(document.ids) - 1) for document in swapped.row(0)))
    assert pair_keys(other)[0] not in keys
    assert np.array_equal(filled["tokens"], batch["tokens"])


def test_a_file_with_one_letter_changed_is_another(rows_of):
    facts = [rows_of({**TEXTS, "chosen": answer}).fingerprint()["lines"] for answer in (" 4", " 4", " 6")]
    assert facts[0] == facts[1] != facts[2]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[1]", "line 1: expected .prompt., .chosen. and .rejected."),
        ({"prompt": "a", "chosen": "b"}, "line 1: expected"),
        ({"chosen": "b", "rejected": "c"}, "line 1: expected"),
        ({"prompt": "a", "chosen": "b", "rejected": [NO]}, "line 1: expected"),
        ({"prompt": "a", "chosen": " ", "rejected": "c"}, '"chosen" has no answer to the prompt, or an empty one'),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, '"rejected" has no answer to the prompt, or an empty one'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same: there is nothing to prefer"),
        ({"chosen": [HI, YES], "rejected": [{**HI, "content": "ho"}, NO]}, "the prompts of .* differ"),
        ({"chosen": [HI, EARLIER[2], YES], "rejected": [HI, HI, NO]}, "of the user, not of the assistant: the prompts"),
        ({"prompt": [HI], "chosen": [HI, YES], "rejected": [HI, NO]}, 'or the list repeats "prompt"'),
        ({"chosen": [HI, YES], "rejected": [HI]}, '"rejected" has no answer'),
        ({"prompt": "ho", "chosen": [HI, YES], "rejected": [HI, NO]}, 'do not both begin with "prompt"'),
        ({"chosen": [HI, {"role": "assistant"}], "rejected": [HI, NO]}, 'message 2 has no "content"'),
    ],
)
def test_what_is_no_pair_is_refused_at_the_start(rows_of, record, message):
    with pytest.raises(UserError, match=f"pairs.jsonl, line 1: .*{message.removeprefix('line 1: ')}"):
        rows_of(record)


def test_what_cannot_be_compared_is_refused(rows_of, chat_tokenizer, write):  # noqa: F811
    with pytest.raises(
        UserError, match=r"line 1: the pair has 20 tokens.*max_target_length=19: raise it.*not truncated"
    ):
        rows_of(TEXTS, length=19).row(0)
    assert len(rows_of(TEXTS, length=20).row(0)) == 2
    tokenizer, _ = chat_tokenizer(QWEN)
    several = {"chosen": [HI, YES, HI, YES], "rejected": [HI, NO, HI, NO]}
    with pytest.raises(UserError, match="several turns"):
        rows_of(several, tokenizer=tokenizer, length=400).row(0)
    with pytest.raises(UserError, match=r"line 1: messages are written by a chat template"):
        rows_of({"chosen": [HI, YES], "rejected": [HI, NO]}).row(0)
    inputs = InputSpec.of(resolve_config.load([BASE]), ByteTokenizer())
    with pytest.raises(UserError, match=r"pairs.txt is not a .jsonl file; src.train_dpo reads lines of JSON: expected"):
        PairSource(str(write("pairs.txt", "text")), "dataset_path", inputs)
    with pytest.raises(UserError, match=r"has no document: expected .*chosen.* and .*rejected"):
        PairSource(str(write("none.jsonl", "")), "dataset_path", inputs)
