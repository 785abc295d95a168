"""Times the training step on the available devices: `python scripts/bench.py [case ...] [key=value ...]`.

Only needs jax, flax, optax, numpy, pyyaml and ml_collections, so that it can run on a bare GPU machine. Data are random
tokens on the device, so only the step is measured. The case `input` measures the input pipeline instead.
"""

import argparse
import contextlib
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from src.model.flops import count_params, flops_per_token
from src.model.spec import model_spec
from src.parallel.chips import run_peak
from src.parallel.slices import count_slices, describe_mesh
from src.run import resolve_config
from src.step.compiler_flags import compiler_options
from src.step.state import batch_sharding, init_state
from src.step.trace import trace_train_step
from src.system.exit_codes import run_command

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

# case: the config, and changed keys.
CASES = {
    "quickstart": ("quickstart.yml", []),
    "1b": ("base.yml", ["per_device_batch_size=4", "remat_policy=minimal_with_context"]),
    "1b_full_remat": ("base.yml", ["per_device_batch_size=12"]),
    "1b_unpacked": ("base.yml", ["per_device_batch_size=4", "remat_policy=minimal_with_context", "packing=false"]),
    "input": ("quickstart.yml", []),
}
WARM_UP_STEPS = 3


def main(argv: list[str]) -> None:
    """Runs the named cases (quickstart by default), each with the key=value arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arguments", nargs="*", metavar="case or key=value", help=f"cases: {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after warm-up")
    options = parser.parse_intermixed_args(argv)
    overrides = [argument for argument in options.arguments if "=" in argument]
    cases = [argument for argument in options.arguments if "=" not in argument] or ["quickstart"]
    for case in cases:
        if case not in CASES:
            parser.error(f"no case {case}; the cases are {', '.join(CASES)}")
        file, settings = CASES[case]
        argv = [str(CONFIGS / file), *settings, *overrides]
        print(f"{case}: {' '.join([file, *settings, *overrides])}")
        (bench_input if case == "input" else bench_step)(argv, options.steps)


def bench_step(argv: list[str], steps: int) -> None:
    """Prints a training step's time, tokens per second, peak memory, and MFU if the device's peak is known."""
    config = resolve_config.load(argv)
    jax.config.update("jax_default_matmul_precision", config.step.matmul_precision)
    device = jax.devices()[0]
    spec = model_spec(config.model, config.step, config.batch.max_target_length)
    options = compiler_options(config.aot.compile_xla_flags, device, count_slices(jax.devices()))
    traced = trace_train_step(config, jax.devices(), options)
    plan, layout, hparams = traced.plan, traced.plan.layout, traced.hparams
    rows, length = traced.batch["tokens"].shape
    shardings = jax.tree.map(lambda leaf: leaf.sharding, traced.state)
    state = jax.jit(lambda: init_state(plan), out_shardings=shardings)()
    batch = jax.device_put(random_batch(rows, length, config.model.vocab_size), batch_sharding(layout))

    start = time.perf_counter()
    compiled = traced.train.lower(state, batch, hparams).compile()
    compile_seconds = time.perf_counter() - start
    seconds = []
    for step in range(WARM_UP_STEPS + steps):
        start = time.perf_counter()
        state, metrics = compiled(state, batch, hparams)
        jax.block_until_ready((state, metrics))
        if step >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - start)

    median = statistics.median(seconds)
    tokens_per_device = rows * length / median / layout.mesh.size
    flops = flops_per_token(spec, config.batch.max_target_length)
    peak = run_peak(device, config.step.dtype, config.step.matmul_precision)
    print(
        f"  jax {jax.__version__}, {layout.mesh.size} x {device.device_kind}, mesh {describe_mesh(layout.mesh.shape)}"
    )
    print(f"  {count_params(spec):,} parameters, {rows} rows x {length} tokens, attention {plan.kernel}")
    print(f"  compile        {compile_seconds:.1f} s")
    print(f"  step           {1000 * median:.1f} ms (median of {steps}; minimum {1000 * min(seconds):.1f})")
    print(f"  tokens         {tokens_per_device:,.0f} per second per device")
    print(f"  TFLOP/s        {tokens_per_device * flops.causal / 1e12:.2f} per device (attention counted causally)")
    if peak:
        mfu, palm = (tokens_per_device * count / peak for count in (flops.causal, flops.palm))
        print(f"  MFU            {mfu:.1%} (attention counted causally), {palm:.1%} (as in PaLM)")
    print(f"  peak memory    {peak_memory(device) / 2**30:.2f} GiB")
    print(f"  loss           {float(metrics['loss']):.4f}")


def random_batch(rows: int, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Creates rows of random tokens, with four documents each."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length + 1), np.int32)
    documents = np.arange(length, dtype=np.int32) * 4 // length
    starts = np.searchsorted(documents, documents)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.broadcast_to(documents + 1, (rows, length)),
        "positions": np.broadcast_to((np.arange(length) - starts).astype(np.int32), (rows, length)),
        "loss_mask": np.ones((rows, length), np.float32),
    }


def peak_memory(device: jax.Device) -> int:
    """Returns peak bytes of the device if it counts them, else of the process."""
    with contextlib.suppress(KeyError, TypeError):  # a backend that does not count returns None
        return device.memory_stats()["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bench_input(argv: list[str], steps: int) -> None:
    """Prints the input pipeline's tokens per second: reading, shuffling, tokenizing and packing on one host."""
    from src.data.loader import train_batches
    from src.data.open import open_sources
    from src.data.tokenizer import make_tokenizer
    from src.data.types import InputSpec

    config = resolve_config.load(argv)
    rows = np.arange(round(config.batch.per_device_batch_size))
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    inputs = InputSpec.of(config, tokenizer)
    data, _ = open_sources(inputs, config.evaluation)
    batches = train_batches(inputs, data, rows, len(rows))
    next(batches)
    count = 100 * steps
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    seconds = time.perf_counter() - start
    print(f"  {len(rows)} rows x {config.batch.max_target_length} tokens, {config.data.tokenizer_type} tokenizer")
    print(f"  tokens         {count * len(rows) * config.batch.max_target_length / seconds:,.0f} per second")


if __name__ == "__main__":
    run_command(main, may_exit=True)
