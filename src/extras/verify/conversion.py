"""Check i: weights written as a Hugging Face folder read back bit for bit, and give transformers the same logits."""

import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from src.checkpoint.load_weights import undotted
from src.config.model_folders import is_hf_folder
from src.config.run_configs import HUB
from src.config.schema import Config
from src.config.yaml import BASE, CONFIGS
from src.extras.verify.locate import EMBEDDED, LAYER, UNROLLED, forward_values, parting
from src.extras.verify.logits import NO_PATTERNS, of_adapters
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, PASS, Row, first_line, none_of, not_applicable, worst
from src.extras.verify.subject import Context, Subject, flat
from src.model.params import Tree, by_path, dotted, nested
from src.run import resolve_config
from src.step.plan import StepPlan
from src.system.errors import UserError
from src.system.imports import optional

# In units of how far the logits move if each weight changes by about one float32 epsilon, because models differ in how
# they amplify rounding. A unit is 3e-6 to 3e-5 of the logits' standard deviation, 1e-4 with the gated delta rule, 6e-3
# in Gemma 4. Clean figures of five families, three seeds each, are 0.3 to 1.3 units; swapping two tensors moves the
# logits by one standard deviation or more.
BOUND = 10
# In standard deviations of the logits. If BOUND units are more than LARGEST_BOUND, rounding could hide a fault, so the
# row is not applicable; but a difference above both BOUND units and SURELY_WRONG still fails.
LARGEST_BOUND = 0.1
# Relative to the largest entry that an adapter adds to its weight: rounding gives 7e-8, and another factor 0.5 or more.
ADAPTER_BOUND = 1e-4
SURELY_WRONG = 0.5


def rows(context: Context) -> Iterator[Row]:
    """Exports the random weights, reads them back, and compares logits with transformers if it and torch are installed.

    Adapters are left out, but for a row of their own. A model without a Hugging Face family is not applicable, unless
    it is an `unchanged_model`: then the row fails, as it does if the folder cannot be read back.
    """
    if not optional("hf") or not optional("evaluation"):
        yield not_applicable("Hugging Face folder", "src/extras/hf or src/extras/evaluation is missing")
        return
    from src.extras.hf.load import load_weights
    from src.extras.hf.model_keys import find_family
    from src.extras.hf.save import save_folder

    subject = context.subject
    plan = subject.plan(**NO_PATTERNS)
    model = subject.config.replace(trainable_position_size=plan.spec.trainable_position_size).model  # -1: the length
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        family, config_json = find_family(model, subject.length)
    except UserError as error:
        name = unchanged_model(context.whole)
        row = not_applicable("Hugging Face folder", error)
        yield row._replace(status=FAIL, note=f"{name} is no longer recognised: {row.note}") if name else row
        return
    weights = {path: array for path, array in by_path(subject.weights).items() if path[0] != "lora"}
    with tempfile.TemporaryDirectory() as name:
        save_folder(Path(name), family, config_json, weights, model.vocab_size)
        tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), plan.shapes)
        try:
            yield _same_bits(plan, weights, by_path(load_weights(name, tree)))
            yield _same_logits(subject, plan, weights, name)
            yield _same_adapters(subject, family, tree, name)
        except UserError as error:
            yield Row("written and read back", FAIL, note=str(error))


def _same_adapters(subject: Subject, family: Any, tree: Tree, base: str) -> Row:
    """Writes the adapters as a folder of peft, for the model in the folder `base`, and reads both back, merged."""
    name, step = "adapters written for peft and read back", subject.config.step
    if not step.lora_rank:
        return not_applicable(name, "lora_rank is 0")
    from src.extras.hf.load import load_weights
    from src.extras.hf.peft import save_adapters

    weights, adapters = by_path(subject.weights), by_path(subject.weights["lora"])
    pairs = {path[:-1]: (adapters[(*path[:-1], "down")], adapters[path]) for path in adapters if path[-1] == "up"}
    facts = {"rank": step.lora_rank, "alpha": step.lora_alpha, "base": base}
    shapes = {path: leaf.shape for path, leaf in by_path(tree).items()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_adapters(Path(folder), family, shapes, subject.config.model.vocab_size, pairs, facts)
        except UserError as error:
            return not_applicable(name, error)
        found = by_path(load_weights(folder, tree))
    errors = {}
    for path, added in of_adapters(subject, flat(subject.weights)).items():
        key = undotted(path)
        errors[path] = float(np.max(np.abs(np.asarray(found[key]) - weights[key] - added)) / np.max(np.abs(added)))
    return worst(name, errors, ADAPTER_BOUND)


def unchanged_model(config: Config) -> str:
    """Returns `model_name` if it is a Hugging Face model or in configs/models, and no key changes the model; else "".

    Each such model has a family. Changes of `vocab_size` and `dropout_rate` do not count.
    """
    name = config["model_name"]
    is_known = is_hf_folder(name) or name.startswith(HUB) or (CONFIGS / "models" / f"{name}.yml").is_file()
    if not name or not is_known:
        return ""
    of_run = {key: config[key] for key in ("vocab_size", "dropout_rate")}
    named = resolve_config.load([str(BASE), f"model_name={name}"]).replace(**of_run)
    return name if named.model == config.model else ""


def _same_bits(plan: StepPlan, weights: Mapping, found: Mapping) -> Row:
    """Compares the bits of all weights, except the vocabulary's padding, which is not written."""
    different = []
    for path, axes in by_path(plan.axes).items():
        kept = tuple(slice(plan.spec.vocab_size if axis == "vocab" else None) for axis in axes)
        if np.asarray(found[path])[kept].tobytes() != weights[path][kept].tobytes():
            different.append(dotted(path))
    return none_of("written and read back", different, f"{len(weights)} weights")


def _same_logits(subject: Subject, plan: StepPlan, weights: Mapping, folder: str) -> Row:
    """Compares the model's logits with the logits of transformers for `folder`, relative to their standard deviation.

    A failed row names the first layer whose output differs, or why transformers does not load the folder. The row is
    not applicable if torch or transformers is not installed, or rounding alone moves the logits too far.
    """
    name = "logits of transformers"
    if missing := [package for package in ("torch", "transformers") if not find_spec(package)]:
        return not_applicable(name, f"{' and '.join(missing)} is not installed")
    import torch
    import transformers

    from src.extras.evaluation.scoring import compute_logits

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens = np.random.default_rng(subject.seed).integers(0, plan.spec.vocab_size, (2, subject.length), np.int32)
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        return Row(name, FAIL, note=f"transformers does not load the folder: {first_line(error)}")
    with torch.no_grad():
        output = loaded(torch.tensor(tokens).long(), output_hidden_states=True)
    theirs = output.logits.numpy()
    rng, ours = np.random.default_rng(1), compute_logits(plan, plan.split(nested(weights)), tokens)
    rounded = {path: w * rng.normal(1, np.finfo(w.dtype).eps, w.shape).astype(w.dtype) for path, w in weights.items()}
    moved = compute_logits(plan, plan.split(nested(rounded)), tokens) - ours
    sizes = (np.max(np.abs(x)) / np.std(ours) for x in (ours - theirs, BOUND * moved))
    figure, bound = (float(np.nan_to_num(size, nan=np.inf)) for size in sizes)
    row, position, _ = np.unravel_index(np.argmax(np.abs(ours - theirs)), ours.shape)
    wrong = not np.all(np.isfinite(ours)) or figure > max(bound, SURELY_WRONG)
    if bound > LARGEST_BOUND and not wrong:
        why = "rounding alone moves these logits, as when a router's choice is close: a fault would not show"
        return Row(name, NOT_APPLICABLE, figure, bound, why)
    note = f"{type(loaded).__name__}, {tokens.size} tokens; they differ most at token {position} of text {row}"
    if figure <= bound and not wrong:
        return Row(name, PASS, figure, bound, note)
    ones = np.ones_like(tokens)
    texts = {"tokens": tokens, "targets": tokens, "segment_ids": ones, "positions": np.cumsum(ones, axis=1) - 1}
    unrolled = Subject(subject.config.replace(**NO_PATTERNS, **UNROLLED)).with_weights(nested(weights))
    found = forward_values(unrolled, unrolled.reference_plan, texts)
    inputs = [array for label, array in found if label == EMBEDDED or label.endswith(LAYER)]
    labels = [EMBEDDED, *(f"layer {layer}" for layer in range(len(inputs) - 1))]
    states = [state.numpy() for state in output.hidden_states]
    place = parting([*zip(labels, inputs, strict=True)], [*zip(labels, states, strict=False)], ones > 0, bound)
    place = place or f"layer {len(inputs) - 1}"
    return Row(name, FAIL, figure, bound, f"{note}, from {place} on")
