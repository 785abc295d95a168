"""Describes a run's settings and data before its first step, and how it ended after its last."""

import datetime
import signal
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from src.checkpoint.run_folder import RunFolder, describe_step, latest_step
from src.config import load as configuration
from src.config.dataset_spec import DatasetSpec, train_specs
from src.config.schema import Config
from src.data.document_stream import DocumentStream, rows_per_epoch
from src.data.types import Conversation, EvalSet, InputSpec, RowSource, Source, Tokenizer, TrainData, is_stream
from src.model.flops import FlopsPerToken, count_params, flops_per_token
from src.parallel.slices import describe_mesh
from src.run.environment import read_environment
from src.step.optimizer_rules import describe_rules
from src.step.plan import StepPlan
from src.step.trace import TracedTrainStep
from src.system.errors import UserError, counted, show
from src.system.imports import optional

_DOCUMENTS_LOOKED_AT = 8  # of each source, to estimate its documents' size
_FEW_OF_ROW, _MANY_STEPS = 3, 100  # warn if a row reads fewer documents in a run of at least this many steps
_FEW = 0.03  # the header mentions cut documents if they exceed this share of a source


def print_header(rows: Iterable[tuple[str, str]]) -> None:
    """Prints names and values in two columns; further lines of a value are aligned under its first."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        show(f"{name:<{width}}  {value.replace(chr(10), chr(10) + ' ' * (width + 2))}")


def step_flops(plan: StepPlan, length: int) -> FlopsPerToken:
    """Counts a step's FLOPs per token, for sequences of `length` tokens, without the gradients of frozen weights."""
    frozen_flops = optional("frozen_flops") if plan.split(plan.shapes).frozen else None
    return frozen_flops.trained_flops(plan, length) if frozen_flops else flops_per_token(plan.spec, length)


def run_header(
    config: Config,
    traced: TracedTrainStep,
    inputs: InputSpec,
    data: TrainData,
    eval_sets: Sequence[EvalSet],
    folder: RunFolder,
    first_step: int,
    software: Mapping[str, str],
) -> list[tuple[str, str]]:
    """Describes the run as names and values: folder, devices, main settings and automatic choices, and changed keys.

    `software` is the result of `environment`. Values that do not apply to the run are left out. Reads and tokenizes a
    few documents, raising as `describe_conversations` and `few_documents` do.
    """
    plan, tokenizer = traced.plan, inputs.tokenizer
    flops = step_flops(plan, config.batch.max_target_length)
    weights = plan.split(plan.shapes)
    trained = f"{sum(leaf.size for leaf in jax.tree.leaves(weights.trainable)):,} parameters"
    trained += f", with adapters of rank {plan.step.lora_rank}" if plan.step.lora_rank else ""
    by_rule = describe_rules(plan.step, plan.rules, weights.trainable)
    packed = "packed, cutting none that fits a row" if config.data.use_sft else "packed"
    in_order = all(is_stream(source) and not source.shuffles for source in data.sources)
    order = "the stream's order" if in_order else f"shuffled by seed {config.data.data_shuffle_seed}"
    order += f", {packed if config.batch.packing else 'a document per row'}"
    loss = [config.step.loss, "next_token_loss in evaluations"] if config.step.loss else []
    loss += [f"in {tiles} tiles (num_vocab_tiling)"] if (tiles := plan.step.num_vocab_tiling) > 1 else []
    compiled = "compiled by this run" + f" by the profile {config.aot.pgle_profile}" * bool(config.aot.pgle_profile)
    compiled = f"loaded from {file}" if (file := config.aot.compiled_trainstep_file) else compiled
    ramp = traced.schedule.ramp
    mesh, whole = plan.layout.mesh, []
    if mesh.size > 1 and (whole_arrays := optional("aot.whole_arrays")):
        from src.parallel.chips import memory_of

        whole = whole_arrays.whole_lines(plan, traced.state, memory_of(mesh.devices.flat[0].device_kind))
    chats = ""
    if config.data.use_sft:
        from src.extras.sft_summary import describe_conversations

        chats = describe_conversations(inputs, data)
    about_data = describe_data(train_specs(config.data), data)
    about_data += few_documents(inputs, data, traced.rows, config.run.steps)
    step = config.step
    rows = {
        "run": f"{folder.path} (run_name={folder.name} resumes it)",
        "software": ", ".join(f"{name} {software[name]}" for name in ("MinText", "jax", "Python")),
        "devices": f"{software['devices']}, processes: {software['processes']}",
        "mesh": describe_mesh(plan.layout.mesh.shape),
        "whole": "\n".join(whole),
        "pipeline": schedule.describe() if (schedule := plan.execution.schedule) else "",
        "model": f"{count_params(plan.spec):,} parameters, {counted(len(plan.spec.layers), 'layer')}",
        "optimizer": by_rule,
        "trained": trained if weights.frozen else "all parameters",
        "step": f"{counted(traced.rows, 'row')} x {config.batch.max_target_length} = {traced.tokens:,} tokens",
        "batch ramp": traced.schedule.describe(config.run.steps) if ramp else "",
        "FLOPs per token": f"{flops.causal:.4g} (attention causal), {flops.palm:.4g} (as in PaLM)",
        "precision": f"weights {step.weight_dtype}, compute {step.dtype}, matmul {step.matmul_precision}",
        "8 bits": plan.quantization.description,
        "attention": f"{plan.kernel} ({plain})" if (plain := plan.why_not_fused) else plan.kernel,
        "layers": f"{'scanned' if plan.execution.scan_layers else 'unrolled'} (scan_layers={step.scan_layers})",
        "loss": ", ".join(loss),
        "recomputed": f"remat_policy {step.remat_policy}",
        "train step": compiled + ", and for each smaller batch when it begins" * bool(ramp),
        "data": "\n".join(about_data),
        "evaluation": "\n".join(map(describe_eval_set, eval_sets)),
        "tokenizer": describe_tokenizer(config.data.tokenizer_type, tokenizer),
        "vocabulary": f"{config.model.vocab_size:,}",
        "order": order,
        "conversations": chats,
        "steps": f"{first_step} to {config.run.steps}",
        "TensorBoard": f"tensorboard --logdir {folder.path / 'tensorboard'} (after pip install tensorboard)",
        "config": "\n".join(configuration.diff_from_base(config)) or "base.yml",
    }
    return [(name, value) for name, value in rows.items() if value]


def dates(folder: RunFolder, first_step: int) -> dict[str, str]:
    """Returns, for environment.json, when the run was `started` and, in a later start, `started again`: now."""
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    try:
        before = read_environment(folder.path) if first_step else {}
        return {"started": str(before["started"]), "started again": now}
    except (UserError, KeyError):  # missing or malformed: this start writes environment.json again
        return {"started": now}


# ---- Descriptions of the data


def describe_tokenizer(kind: str, tokenizer: Tokenizer | None) -> str:
    """Describes a tokenizer: its kind and size, and why transformers may give other ids."""
    if not tokenizer:
        return "none"
    return f"{kind}, {'; '.join(filter(None, [f'{tokenizer.vocab_size:,} ids', tokenizer.caveat]))}"


def describe_data(specs: Sequence[DatasetSpec], data: TrainData) -> list[str]:
    """Describes each source in a line: its type, location and size, and its share of the rows."""
    lines = []
    for spec, source, weight in zip(specs, data.sources, data.weights, strict=True):
        place = " ".join(filter(None, (spec.dataset_name, spec.dataset_path, spec.dataset_factory)))
        if spec.dataset_type == "text" and not place:
            place = "the Python standard library's source"
        line = ", ".join(filter(None, (place, amount(source))))
        share = f", {weight / sum(data.weights):.4g} of the rows" if spec.name else ""
        lines.append(f"{spec.name}: " * bool(spec.name) + f"{spec.dataset_type}: {line}{share}")
    return lines


def describe_eval_set(data: EvalSet) -> str:
    """Describes an evaluation set in a line: its source, and how much of it an evaluation reads."""
    facts = data.source.fingerprint()
    part = f"{facts['part']}: " if "part" in facts else f"{facts['type']}: "
    taken = "one epoch" if data.steps == -1 else counted(data.steps, "batch")
    return f"{data.name}: " * bool(data.name) + f"{part}{amount(data.source)}, {taken} per evaluation"


def amount(source: Source | RowSource) -> str:
    """Describes how much data a source has, and the share of cut documents if it exceeds `_FEW`."""
    if is_stream(source):
        order = "shuffled in windows" if source.shuffles else "in its own order"
        return f"a stream for each host, {order}: a run can only resume with {counted(jax.process_count(), 'host')}"
    if isinstance(source, RowSource):
        return f"{counted(source.row_count, 'row')} per epoch" if source.row_count else "random tokens"
    count, cut = len(source), 0.0
    if (keys := source.document_keys()) is not None:  # equal for consecutive pieces of a document
        pieces = np.diff(np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]])))
        count, cut = len(pieces), float((pieces > 1).mean())
    share = f"{cut:.0%} of them " * (cut < 1)
    cuts = f", {share}cut into pieces by max_document_bytes" * (cut > _FEW)
    return counted(count, "conversation" if isinstance(source[0], Conversation) else "document") + cuts


def few_documents(inputs: InputSpec, data: TrainData, rows: int, steps: int) -> list[str]:
    """Returns a line for each source with fewer documents than `rows`, and one if a row reads few of its documents.

    Reads and tokenizes a source's first documents, raising as `DocumentStream.documents` does.
    """
    lines, tokens, spreads = [], steps * inputs.batch.max_target_length, inputs.rules > 1 and not inputs.data.use_sft
    for name, source, weight in zip(data.names, data.sources, data.weights, strict=True):
        if isinstance(source, RowSource) or rows_per_epoch(inputs, source) is not None:  # each row is one item
            continue
        count, stream, of = len(source), DocumentStream(inputs, source, name), f"{name}: " * bool(name)
        if count < rows:
            where = ": rows that share one begin at different places in it" * spreads
            lines.append(f"{of}{counted(count, 'document')} for {rows:,} rows{where}")
        looked_at = [stream.documents(ordinal) for ordinal in range(min(count, _DOCUMENTS_LOOKED_AT))]
        size = max(np.mean([sum(len(each.ids) - 1 for each in documents) for documents in looked_at]), 1)
        if 0 < (of_row := tokens * weight / sum(data.weights) / size) < _FEW_OF_ROW and steps >= _MANY_STEPS:
            lines.append(
                f"{of}a row reads {of_row:.2g} documents of about {size:,.0f} tokens in the whole run: batches vary "
                "little. Shorter documents mix better: max_document_bytes cuts texts, src.tokenize_dataset cuts all"
            )
    return lines


# ---- After the last step


def ending(config: Config, step: int, eval_loss: float | None) -> str:
    """Explains why a run is finished at this step, given the loss of its evaluation, if any; "" if it is not."""
    target = config.evaluation.target_eval_loss
    if target and eval_loss is not None and eval_loss <= target:
        reached = f"eval_loss {eval_loss:.4f} after step {step} reached target_eval_loss={target:g}"
        return f"{reached}. To continue, lower it or set it to 0"
    steps = config.run.steps
    return f"this run has made its {steps} steps. To continue, raise steps" if step == steps else ""


def stopped(folder: RunFolder, stopped_by: int, step: int) -> str:
    """Says which signal stopped a run after this step, and what it can be resumed from."""
    latest, name = latest_step(folder.path), "Ctrl-C" if stopped_by == signal.SIGINT else "SIGTERM"
    note = describe_step(folder.path, latest)
    if latest is not None:
        note += f"; run the same command with run_name={folder.name} to resume"
    return f"stopped by {name} after step {step}; {note}"
