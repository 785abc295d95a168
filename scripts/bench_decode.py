"""Compares greedy decoding speed with `transformers` on the same weights: `python scripts/bench_decode.py`.

Needs torch and transformers. The two take turns, so that other load on the machine slows both equally; it prints
medians. The model is a Llama with 12 layers and 134M random float32 parameters.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from src.extras.generation.generate import Generator, sampling
from src.extras.generation.inference_weights import in_activation_dtype, unrolled
from src.extras.generation.loaded_model import load_model
from src.run import resolve_config
from src.system.exit_codes import run_command

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_000,
}


def main(argv: list[str]) -> None:
    """Prints a line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=96, help="tokens generated after it")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    length = options.prompt + options.new
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
        references = {
            kind: LlamaForCausalLM.from_pretrained(folder, attn_implementation=kind).eval()
            for kind in ("sdpa", "eager")
        }
        config = resolve_config.load(
            [
                str(Path(__file__).resolve().parents[1] / "configs" / "base.yml"),
                *(f"model_name={folder}", f"load_parameters_path={folder}", f"max_target_length={length}"),
                *("dtype=float32", "decode_sampling_strategy=greedy"),
            ]
        )
        plan, weights = unrolled(*load_model(config, None))
        weights = in_activation_dtype(plan, weights)
        print(f"{jax.devices()}, torch with {torch.get_num_threads()} threads; prompts of {options.prompt} tokens")
        for rows in options.batch:
            prompts = np.random.default_rng(0).integers(3, 32_000, (rows, options.prompt), np.int32)
            generator = Generator(
                plan, weights, sampling(config.decoding), seed=0, length=length, prefill_length=options.prompt
            )
            ours, theirs = (
                here(generator, prompts, options.new),
                {kind: there(reference, prompts, options.new) for kind, reference in references.items()},
            )
            compare(rows, ours, theirs, options.turns)


def here(generator: Generator, prompts: np.ndarray, new: int) -> Callable[[int], np.ndarray]:
    """Returns a function that generates the first `count` tokens after each prompt, [B, count]."""
    tokens_BT, lengths_B = generator.padded(list(prompts), len(prompts))
    generator.compile(*tokens_BT.shape)

    def generate(count: int = new) -> np.ndarray:
        sampled = generator.tokens(tokens_BT, lengths_B, np.arange(len(tokens_BT), dtype=np.int32))
        return np.stack([next(sampled)[: len(prompts)] for _ in range(count)], axis=1)

    return generate


def there(model: LlamaForCausalLM, prompts: np.ndarray, new: int) -> Callable[[int], np.ndarray]:
    """Returns a function like the one of `here` that uses `transformers`."""
    ids = torch.from_numpy(prompts.astype(np.int64))

    def generate(count: int = new) -> np.ndarray:
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        return whole[:, ids.shape[1] :].numpy()

    return generate


def compare(rows: int, ours: Callable, theirs: dict[str, Callable], turns: int) -> None:
    """Runs all generators in turns; prints tokens per second, the ratios to the fastest of `theirs`, and agreement.

    Speeds are of whole generations, and of the tokens after the first, without prefill.
    """
    contenders = {"here": ours, **theirs}
    first = {name: generate() for name, generate in contenders.items()}  # warm up
    agreed = np.mean(first["here"] == first["sdpa"])
    prefill, whole = ({name: [] for name in contenders} for _ in range(2))
    for _ in range(turns):
        for name, generate in contenders.items():
            for seconds, arguments in ((prefill, (1,)), (whole, ())):
                start = time.perf_counter()
                generate(*arguments)
                seconds[name].append(time.perf_counter() - start)
    count = first["here"].size
    rates = {}
    for name in contenders:
        decode = statistics.median(w - p for w, p in zip(whole[name], prefill[name], strict=True))
        rates[name] = (count / statistics.median(whole[name]), (count - rows) / decode)
        print(f"batch {rows}  {name:6} {rates[name][0]:7.1f} tokens/s, {rates[name][1]:7.1f} after the first token")
    best = max(rates, key=lambda name: rates[name][0] if name != "here" else 0.0)
    whole_ratio, decode_ratio = (rates["here"][i] / rates[best][i] for i in range(2))
    print(f"batch {rows}  here / {best}: {whole_ratio:.2f}, {decode_ratio:.2f}; the same tokens: {agreed:.1%}")


if __name__ == "__main__":
    run_command(main, may_exit=True)
