"""Compares predicted with published speeds, as a Markdown table: `python scripts/predict_published.py`.

The collectives of these runs are counted in closed form, because compiling each run takes minutes to hours; tests check
that form against compiled programs. Nothing is fitted to a run: aot/roofline.py has the only constants.
"""

import itertools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax.numpy as jnp

from scripts.recipes import recipes
from src.extras.aot.hlo import RING_SHARE, Collective
from src.extras.aot.roofline import Prediction, predict, step_work
from src.model.execution import Execution
from src.model.flops import count_params
from src.model.spec import ModelSpec, model_spec
from src.parallel.topology import peak_flops
from src.system.exit_codes import run_command

STATE_BYTES = 12  # per parameter: the weight and Adam's two moments, in float32


class Row(NamedTuple):
    """A published cell; MFU in percent, by the PaLM paper's definition."""

    run: str
    slices: int
    published: float
    predicted: float
    prediction: Prediction


def main(argv: list[str]) -> None:
    """Prints the table, and the predictions' median error."""
    rows = list(predicted())
    print("| run | slices | published | predicted | off by | longest after compute |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        others = {name: getattr(row.prediction, f"{name}_seconds") for name in ("memory", "ici", "dcn")}
        longest = max(others, key=others.__getitem__)
        share = others[longest] / row.prediction.step_seconds
        off = row.predicted - row.published
        print(
            f"| {row.run} | {row.slices} | {row.published:.1f}% | {row.predicted:.1f}% | {off:+.1f} | "
            f"{longest}, {share:.0%} of the step |"
        )
    print(f"\nMedian of the absolute errors: {median_error(rows):.1f} points of MFU, over {len(rows)} cells.")


def median_error(rows: list[Row]) -> float:
    """Returns the median absolute error of MFU, in points."""
    return statistics.median(abs(row.predicted - row.published) for row in rows)


def predicted() -> Iterator[Row]:
    """Yields every published cell of a dense model on TPUs with its prediction."""
    for recipe in recipes():
        config, chip = recipe.load(), recipe.topology().chip
        spec = model_spec(config.model, config.step, config.batch.max_target_length)
        execution = Execution(remat_policy=config.step.remat_policy, remat_custom=dict(config.step.remat_custom))
        # The only GPU recipe shares the weights among hosts, for which the form below does not hold.
        if spec.has_experts or recipe.topology().platform == "gpu":
            continue
        mesh = {"data": config.mesh.ici_data_parallelism, "tensor": config.mesh.ici_tensor_parallelism}
        mesh["fsdp"] = recipe.topology(1).num_devices // math.prod(mesh.values())
        tokens = recipe.tokens / recipe.topology().num_devices
        work = step_work(
            spec,
            execution,
            "flash",
            tokens=tokens,
            length=config.batch.max_target_length,
            sharing=mesh["tensor"],
            state_bytes=STATE_BYTES * count_params(spec) // (mesh["fsdp"] * mesh["tensor"]),
        )
        links = torus_links(recipe.topology(1).shape, mesh)
        for slices, figures in recipe.published.items():
            moved = step_collectives(spec, execution, tokens, mesh, links, slices)
            peak = peak_flops(chip.kind, spec.dtype)
            prediction = predict(work, chip, peak, moved)
            yield Row(recipe.name, slices, figures.utilization(peak), 100 * prediction.mfu_palm, prediction)


def torus_links(shape: Sequence[int], mesh: Mapping[str, int]) -> dict[str, float]:
    """Returns, for each mesh axis of more than one device, the share of a device's links that it uses.

    Axes use whole dims of the slice's torus if possible, else parts of them.

    Args:
        shape: Chips of a slice along each dim.
        mesh: Axis sizes, whose product is the slice's number of chips.
    """
    sizes = {axis: size for axis, size in mesh.items() if size > 1}
    parts = [(dim, prime) for dim, size in enumerate(shape) for prime in prime_factors(size)]
    ways = []
    for axes in itertools.product(sizes, repeat=len(parts)):
        along = dict.fromkeys(sizes, 1)
        for axis, (_, prime) in zip(axes, parts, strict=True):
            along[axis] *= prime
        if along == sizes:
            ways.append({(axis, dim) for axis, (dim, _) in zip(axes, parts, strict=True)})
    dims = Counter(axis for axis, _ in min(ways, key=len))
    return {axis: dims[axis] / len(shape) for axis in sizes}


def prime_factors(number: int) -> list[int]:
    """Factors a number into primes."""
    prime = next((n for n in range(2, number + 1) if number % n == 0), None)
    return [prime, *prime_factors(number // prime)] if prime else []


def step_collectives(
    spec: ModelSpec,
    execution: Execution,
    tokens: float,
    mesh: Mapping[str, int],
    links: Mapping[str, float],
    slices: int,
) -> list[Collective]:
    """Lists a dense model's collectives in a step, all in the compute dtype; arrays as small as norms are left out.

    Args:
        spec: The model, with a separate output projection.
        execution: How its layers are computed.
        tokens: Per step and device.
        mesh: Sizes of data, fsdp and tensor within a slice; each slice has a copy of the model.
        links: Share of a device's links that each axis of more than one device uses.
        slices: Number of slices.
    """
    itemsize, L, D = jnp.dtype(spec.dtype).itemsize, len(spec.layers), spec.emb_dim
    table = spec.padded_vocab_size * D * itemsize // mesh["tensor"]
    weights = count_params(spec) * itemsize // mesh["tensor"]
    layers = weights - 2 * table
    activations = round(tokens * mesh["tensor"] * D * itemsize)
    # Forward and backward, after matmuls with weights split over `tensor`: two per layer, and one each of embedding and
    # logits. Attention's output is needed again in the backward pass.
    again = execution.remat_policy == "full" or (
        execution.remat_policy == "custom" and "out_proj" not in execution.remat_custom
    )
    sums = 4 * L + 2 + L * again

    def collective(kind: str, axis: str, times: int, whole: int) -> Collective:
        sent = round(whole * RING_SHARE[kind](mesh[axis]))
        return Collective(kind, (axis,), "ici", times, whole, sent, links.get(axis, 1.0))

    moved = [
        collective("all-gather", "fsdp", 2, layers),  # forward, backward
        collective("all-gather", "fsdp", 1, 2 * table),
        collective("reduce-scatter", "fsdp", 1, layers + table),
        collective("all-reduce", "fsdp", 1, table),  # of the embedding, to whose gradient every device adds random rows
        collective("all-reduce", "tensor", sums, activations),
        collective("all-reduce", "data", 1, weights // mesh["fsdp"]),
    ]
    whole = weights // mesh["fsdp"]
    sent = round(whole * RING_SHARE["all-reduce"](slices))
    return [each for each in moved if each.sent_bytes] + [Collective("all-reduce", ("data",), "dcn", 1, whole, sent)]


if __name__ == "__main__":
    run_command(main)
