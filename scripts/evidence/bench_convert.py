"""Measures peak memory of converting a model from and to Hugging Face: `python scripts/evidence/bench_convert.py`.

Needs torch and transformers. The model is a Llama with 12 layers of width 1,024 and 443 MB of bfloat16 weights in files
of 100 MB. Each command runs in its own process, and the memory in use before it starts is not counted.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from src.extras.hf import convert

SIZES = {
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def main() -> None:
    """Prints the weights' megabytes and a line for each command."""
    with tempfile.TemporaryDirectory() as folder:
        there, here, back = (str(Path(folder) / name) for name in ("there", "here", "back"))
        _make(there)
        print(f"weights   {sum(file.stat().st_size for file in Path(there).glob('*.safetensors')) / 1e6:6.0f} MB")
        for command in (["from-hf", there, here], ["to-hf", here, back]):
            done = subprocess.run([sys.executable, __file__, *command], capture_output=True, text=True, check=True)
            print(f"{command[0]:8}  {int(done.stdout.split()[-1]) / 1e6:6.0f} MB peak", flush=True)


def _make(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")


def _measure(command: Sequence[str]) -> None:
    """Runs a conversion and prints, as the last word, how many bytes it adds to this process's peak memory."""
    jax.config.update("jax_platforms", "cpu")
    jax.devices()
    before = _peak()
    convert.main(command)
    print(_peak() - before)


def _peak() -> int:
    # Linux only; the resource module's figure would start with the parent process's peak.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    _measure(sys.argv[1:]) if sys.argv[1:] else main()
