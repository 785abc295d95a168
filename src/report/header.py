"""Prints what was chosen for a run, before its first step."""

import datetime
from collections.abc import Iterable, Sequence

import jax

from src.checkpoint.run_folder import RunFolder
from src.config import load as configuration
from src.config.schema import Config
from src.config.source_spec import train_specs
from src.data.describe import describe_conversations, describe_data, describe_eval_set
from src.data.types import EvalSet, InputSpec, TrainData
from src.errors import counted
from src.json_text import parse_json
from src.model.flops import FlopsPerToken, count_params
from src.parallel.slices import describe_mesh
from src.step.build import TracedStep


def print_header(rows: Iterable[tuple[str, str]]) -> None:
    """Prints names and values in two columns, aligning a value's further lines under its first."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value.replace(chr(10), chr(10) + ' ' * (width + 2))}", flush=True)


def run_header(
    config: Config,
    built: TracedStep,
    inputs: InputSpec,
    data: TrainData,
    eval_sets: Sequence[EvalSet],
    folder: RunFolder,
    facts: dict[str, str],
    flops: FlopsPerToken,
    first_step: int,
) -> list[tuple[str, str]]:
    """Returns everything that was chosen for this run, by name, so that a user need not guess."""
    plan, tokenizer = built.plan, inputs.tokenizer
    weights = plan.split(plan.shapes)
    trained = f"{sum(leaf.size for leaf in jax.tree.leaves(weights.trainable)):,} parameters"
    trained += f", with adapters of rank {plan.step.lora_rank}" if plan.step.lora_rank else ""
    packed = "packed, none cut that fits a row" if config.use_sft else "packed"
    order = f"shuffled by seed {config.data_shuffle_seed}, {packed if config.packing else 'a document per row'}"
    return [
        ("run", f"{folder.path} (run_name={folder.name} resumes it)"),
        ("software", ", ".join(f"{name} {facts[name]}" for name in ("MinText", "jax", "Python"))),
        ("devices", f"{facts['devices']}, processes: {facts['processes']}"),
        ("mesh", describe_mesh(plan.layout.mesh.shape)),
        *([("pipeline", schedule.describe())] if (schedule := plan.execution.schedule) else []),
        ("model", f"{count_params(plan.spec):,} parameters, {counted(len(plan.spec.layers), 'layer')}"),
        ("trained", trained if weights.frozen else "all parameters"),
        ("step", f"{counted(built.rows, 'row')} x {config.max_target_length} = {built.tokens:,} tokens"),
        ("FLOPs per token", f"{flops.causal:.4g} (attention causal), {flops.palm:.4g} (as in PaLM)"),
        ("precision", f"weights {config.weight_dtype}, compute {config.dtype}, matmul {config.matmul_precision}"),
        ("attention", plan.kernel),
        ("recomputed", f"remat_policy {config.remat_policy}"),
        ("train step", f"loaded from {file}" if (file := config.compiled_trainstep_file) else "compiled by this run"),
        ("data", "\n".join(describe_data(train_specs(config.data), data))),
        *([("evaluation", "\n".join(map(describe_eval_set, eval_sets)))] if eval_sets else []),
        ("tokenizer", f"{config.tokenizer_type}, {tokenizer.vocab_size:,} ids" if tokenizer else "none"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("order", order),
        *([("conversations", describe_conversations(inputs, data))] if config.use_sft else []),
        ("steps", f"{first_step} to {config.steps}"),
        ("TensorBoard", f"tensorboard --logdir {folder.path / 'tensorboard'} (after pip install tensorboard)"),
        ("config", "\n".join(configuration.diff_from_base(config)) or "base.yml"),
    ]


def dates(folder: RunFolder, first_step: int) -> dict[str, str]:
    """Returns when the run was started first and last, for the report."""
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    try:
        before = parse_json(folder.read_text("environment.json") or "{}") if first_step else {}
        return {"started": str(before["started"]), "started again": now}
    except (ValueError, KeyError, TypeError):
        return {"started": now}
