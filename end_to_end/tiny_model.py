"""Model folders as Hugging Face's, tiny and random, and a comparison of two: what needs transformers here.

python -m end_to_end.tiny_model make FAMILY FOLDER     a family of tests/hf/saved.py; weights, tokenizer, chat template
python -m end_to_end.tiny_model same FOLDER OTHER      exit code 1 unless transformers computes the same logits of both
python -m end_to_end.tiny_model export FOLDER          each family's model, read and exported again: FOLDER/FAMILY/hf
"""

import json
import sys
from pathlib import Path

import tokenizers
import torch
import transformers

from src.extras.hf import convert
from tests.hf import saved

VOCAB = 401  # the 256 bytes, special tokens and merges; a few ids that no text has
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(family: str, folder: Path) -> None:
    """Saves a random model of the family, in float32, with a tokenizer of this repository's documentation."""
    kind, entries = saved.CONFIGS[family]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    saved.save_config(folder, getattr(transformers, kind)(**{**entries, **ids, "vocab_size": VOCAB}))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB - 20,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(["README.md", *map(str, sorted(Path("docs").glob("*.md")))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def same(folder: Path, other: Path) -> bool:
    """Whether transformers computes the same logits, to the last bit, of two folders' models and tokenizers."""
    logits = []
    for path in (folder, other):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        chat = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": " 4"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(ids).logits)
    return torch.equal(*logits)


def export(folder: Path) -> None:
    """Saves a tiny model of each family, converts it, and exports it again."""
    for name in saved.CONFIGS:
        convert.from_hf(saved.save(folder / name / "saved", name), folder / name / "converted")
        convert.to_hf(folder / name / "converted", folder / name / "hf")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", family, folder]:
            make(family, Path(folder))
        case ["same", folder, other]:
            sys.exit(0 if same(Path(folder), Path(other)) else f"{folder} and {other} have other logits")
        case ["export", folder]:
            export(Path(folder))
        case _:
            sys.exit(__doc__)
