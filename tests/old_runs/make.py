"""Makes the runs of this folder, which were begun by commit f47738a, and records how that commit continues them.

From the root of a checkout of that commit, with any Python that it supports:

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 PYTHON /path/to/tests/old_runs/make.py [CASE ...]

`CASE.zip` is a run's folder as it was after step 2 of 6. `expected.json` has the digest of each batch, the losses and
the size of the weights after that. tests/test_old_runs.py resumes the runs with the present code.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent
STOP, STEPS = 2, 6
ARRAYS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")

TINY = {
    "base_emb_dim": 8,
    "base_mlp_dim": 16,
    "base_num_decoder_layers": 1,
    "base_num_query_heads": 1,
    "base_num_kv_heads": 1,
    "head_dim": 8,
    "vocab_size": 264,
    "logits_via_embedding": "true",
    "max_target_length": 32,
    "per_device_batch_size": 1,  # 8 rows on the 8 devices
    "dtype": "float32",
    "remat_policy": "none",
    "opt_type": "sgd",
    "learning_rate": 0.3,
    "steps": STEPS,
    "checkpoint_period": STOP,
    "eval_interval": 2,
    "eval_steps": 2,
    "sample_length": 0,
    "base_output_directory": "runs",
}
CHAT = {"use_sft": "true", "tokenizer_type": "huggingface"}
CASES = {
    "text": {
        "dataset_path": "data/many",
        "eval_fraction": 0.2,
        "eval_mode": "rolling",
        "opt_type": "adamw",
        "learning_rate": 1e-2,
    },
    # Fewer documents than rows.
    "few": {"dataset_path": "data/few", "eval_dataset_path": "data/few/1.txt", "eval_mode": "rolling"},
    "one_line": {"dataset_path": "data/one.jsonl", "eval_dataset_path": "data/few", "eval_steps": -1},
    "unpacked": {"dataset_path": "data/few", "eval_dataset_path": "data/few", "packing": "false"},
    # Files that are not plain text by their name or their first bytes, and a folder behind a symbolic link.
    "odd_files": {"dataset_path": "data/odd", "eval_dataset_path": "data/odd", "eval_steps": -1},
    # Texts that spell the tokens that begin and end a document.
    "spelled": {"dataset_path": "data/spelled.jsonl", "tokenizer_type": "huggingface", "tokenizer_path": "data/inst"},
    "chats": {**CHAT, "dataset_path": "data/chats.jsonl", "tokenizer_path": "data/chatml", "eval_fraction": 0.2},
    # A template that spells them, fewer conversations than rows, and fields that this commit does not read.
    "few_chats": {
        **CHAT,
        "dataset_path": "data/few_chats.jsonl",
        "tokenizer_path": "data/inst",
        "eval_dataset_path": "data/few_chats.jsonl",
    },
    "pairs_of_text": {"use_sft": "true", "dataset_path": "data/prompts.jsonl", "eval_fraction": 0.2},
    "mixture": {
        "datasets": (
            "[{name: web, weight: 3, dataset_path: data/many},"
            " {name: book, weight: 2, dataset_path: data/few},"
            " {name: table, weight: 1, dataset_type: parquet, dataset_path: data/table.parquet},"
            " {name: ids, weight: 2, dataset_type: tokens, dataset_path: data/tokens}]"
        ),
        "eval_datasets": "[{name: one, dataset_path: data/one.jsonl}, {name: few, dataset_path: data/few}]",
    },
    "parquet": {"dataset_type": "parquet", "dataset_path": "data/table.parquet", "eval_fraction": 0.2},
    "parquet_book": {"dataset_type": "parquet", "dataset_path": "data/book.parquet", "eval_interval": -1},
    "tokens": {"dataset_type": "tokens", "dataset_path": "data/tokens", "eval_fraction": 0.2},
    "tokens_unpacked": {
        "dataset_type": "tokens",
        "dataset_path": "data/tokens",
        "eval_fraction": 0.2,
        "packing": "false",
    },
    "custom": {"dataset_type": "custom", "dataset_factory": "old_run_data:documents", "eval_interval": -1},
    # By src.train_dpo, with the run `chats` as its reference.
    "preferences": {
        "dataset_path": "data/preferences.jsonl",
        "tokenizer_type": "huggingface",
        "tokenizer_path": "data/inst",
        "load_parameters_path": "runs/chats",
        "max_target_length": 256,
        "eval_interval": -1,
    },
    "transformed": {"dataset_path": "data/many", "batch_transform": "old_run_data:transform", "eval_interval": -1},
}


# ---- What a run did


def digest_of(arrays):
    """A digest of a host's rows: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode() + arrays[name].tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def recording():
    """Yields the digests of the batches that a run trains on, and of those that it evaluates on, as they are taken."""
    try:
        from src.run import evaluator, run
    except ImportError:  # a commit before that folder
        from src import train, train_dpo

        evaluator, with_batches = sys.modules[train.Evaluator.__module__], (train, train_dpo)
    else:
        with_batches = (run,)
    batches, eval_batches = [], []

    def train_batches(*arguments, original=with_batches[0].train_batches, **keywords):
        made = original(*arguments, **keywords)
        try:
            for batch in made:
                batches.append(digest_of(batch.arrays))
                yield batch
        finally:
            made.close()

    class EvalBatches(evaluator.EvalBatches):
        def __iter__(self):
            for arrays in super().__iter__():
                eval_batches.append(digest_of(arrays))
                yield arrays

    with contextlib.ExitStack() as patches:
        for module in with_batches:
            patches.enter_context(mock.patch.object(module, "train_batches", train_batches))
        patches.enter_context(mock.patch.object(evaluator, "EvalBatches", EvalBatches))
        yield batches, eval_batches


def outcome(state, folder, batches, eval_batches):
    """What is compared, of the steps after `STOP` alone."""
    import jax
    import numpy as np

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = jax.tree.leaves(state.weights.merged())
    return {
        "batches": batches[-(STEPS - STOP) :],
        "eval_batches": eval_batches,
        "losses": [line["loss"] for line in lines if "loss" in line and line["step"] > STOP],
        "evaluations": [
            [line["step"], name, value]
            for line in lines
            for name, value in sorted(line.items())
            if name.startswith("eval_loss") and line["step"] > STOP
        ],
        "weights": sum(float(np.sum(np.abs(np.asarray(leaf, np.float64)))) for leaf in weights),
    }


def arguments(case, **keys):
    """The command line of a case, run where data/ is; the first argument is still to come."""
    return [f"{key}={value}" for key, value in {**TINY, **CASES[case], "run_name": case, **keys}.items()]


# ---- Data


def sentences(seed, count, words=(5, 40)):
    rng = random.Random(seed)
    known = ("the", "of", "é", "and\n", "def", "return", "self", "(", ")", "is", "not", "über", "while", "λ", "3.14")
    return [f"{n}: " + " ".join(rng.choice(known) for _ in range(rng.randint(*words))) for n in range(count)]


def write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_data(data):
    """Writes what the cases read."""
    import pyarrow
    import pyarrow.parquet

    for name in ("many", "few", "odd", "elsewhere", "chatml", "inst"):
        (data / name).mkdir(parents=True)
    for number, text in enumerate(sentences(0, 20)):
        (data / "many" / f"{number:02}.txt").write_text(text)
    for number, text in enumerate(sentences(1, 3, (25, 60))):
        (data / "few" / f"{number}.txt").write_text(text)
    write_lines(data / "one.jsonl", [{"text": sentences(2, 1, (60, 60))[0]}])
    odd = sentences(3, 8)
    (data / "odd" / "marked.txt").write_text("\ufeff" + odd[0])
    (data / "odd" / "array.json").write_text(json.dumps([{"text": text} for text in odd[1:3]]))
    (data / "odd" / "rows.csv").write_text("number,text\n" + "".join(f'{n},"{t}"\n' for n, t in enumerate(odd[3:5])))
    (data / "odd" / "_notes.txt").write_text(odd[5])
    (data / "odd" / "plain.txt").write_text(odd[6])
    (data / "elsewhere" / "linked.txt").write_text(odd[7])
    (data / "odd" / "linked").symlink_to("../elsewhere")
    spelled = [f"<|bos|>{text}<|eos|>" if n % 2 else text for n, text in enumerate(sentences(4, 20))]
    write_lines(data / "spelled.jsonl", [{"text": text} for text in spelled])
    write_chats(data)
    texts = [text if n % 5 else None for n, text in enumerate(sentences(5, 24))]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), data / "table.parquet", row_group_size=9)
    pyarrow.parquet.write_table(pyarrow.table({"text": sentences(6, 2, (40, 60))}), data / "book.parquet")


def write_chats(data):
    """Writes conversations, and two tokenizers of bytes whose templates differ."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*specials, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    templates = {
        "chatml": "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}",
        "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ ' ' + m.content + eos_token }}{% else %}{{ '[I] ' + m.content + ' [/I]' }}{% endif %}{% endfor %}",
    }
    for name, template in templates.items():
        tokenizer.save(str(data / name / "tokenizer.json"), pretty=False)
        settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": template}
        (data / name / "tokenizer_config.json").write_text(json.dumps(settings))
        (data / name / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))

    def chat(number, turns):
        said = sentences(100 + number, 2 * turns, (1, 6))
        return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]

    write_lines(data / "chats.jsonl", [{"messages": chat(n, 1 + n % 3)} for n in range(20)])
    few = [{"messages": chat(n, 2)} for n in range(30, 34)]
    few[0]["tools"] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    few[1]["messages"][1]["weight"] = 0
    few[2]["system"] = "be brief"
    few[3]["messages"][3]["train"] = False
    few[3]["chat_template_kwargs"] = {"thinking": True}
    write_lines(data / "few_chats.jsonl", few)
    pairs = [{"chosen": chat(n, 2), "rejected": [*chat(n, 2)[:3], *chat(n + 1, 2)[3:]]} for n in range(40, 52)]
    pairs[0]["tools"], pairs[1]["chosen"][1]["weight"] = few[0]["tools"], 0
    write_lines(data / "preferences.jsonl", pairs)
    said = sentences(7, 40, (1, 9))
    write_lines(
        data / "prompts.jsonl", [{"prompt": p, "completion": c} for p, c in zip(said[::2], said[1::2], strict=True)]
    )


def main():
    checkout, asked = Path.cwd(), sys.argv[1:]
    sys.path[:0] = [str(checkout), str(FOLDER)]
    os.chdir(tempfile.mkdtemp())
    from src import tokenize_dataset, train, train_dpo

    base = str(checkout / "configs" / "base.yml")
    if not asked:
        write_data(Path("data"))
        keys = {"vocab_size": 264, "dataset_path": "data/many", "eval_interval": -1, "tokenized_path": "data/tokens"}
        tokenize_dataset.main([base, *(f"{key}={value}" for key, value in keys.items())])
        shutil.rmtree(FOLDER / "data", ignore_errors=True)
        shutil.copytree("data", FOLDER / "data", symlinks=True)
    else:
        shutil.copytree(FOLDER / "data", "data", symlinks=True)
    file = FOLDER / "expected.json"
    expected = json.loads(file.read_text()) if asked else {}
    for case in asked or CASES:
        folder = Path("runs", case)
        if case == "preferences":
            shutil.unpack_archive(FOLDER / "chats.zip", "runs/chats")
        with recording() as (batches, eval_batches):
            result = (train_dpo if case == "preferences" else train).main([base, *arguments(case)])
        evaluations = STEPS // STOP  # each of as many batches
        later = eval_batches[len(eval_batches) // evaluations :]
        if case == "preferences":  # batches of the reference, which a resumed run does not compute again
            later = []
        expected[case] = outcome(result.state, folder, batches, later)
        # As a run is that was ended after step `STOP`.
        for step in range(2 * STOP, STEPS + 1, STOP):
            shutil.rmtree(folder / "checkpoints" / str(step))
        shutil.rmtree(folder / "tensorboard")
        for name in ("report.html", "environment.json"):  # which name the folder that they were written in
            (folder / name).unlink()
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= STOP))
        shutil.make_archive(str(FOLDER / case), "zip", folder)
    file.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
