"""Converts Hugging Face model folders to checkpoints and back.

    python -m src.convert from-hf HF_DIR OUT_DIR
    python -m src.convert to-hf CKPT_OR_RUN OUT_DIR [dtype=bfloat16] [load_ema=true]
    python -m src.convert to-peft RUN OUT_DIR
    python -m src.convert check HF_DIR CKPT_OR_RUN

`from-hf` writes to OUT_DIR model.yml, hf_config.json (a copy of the folder's config.json), checkpoint/ and the
tokenizer's files; weights keep the folder's dtypes. `to-hf` takes such an OUT_DIR, a run's folder or one of its
checkpoints, and writes a folder that transformers loads, with the tokenizer, in the checkpoint's dtypes or in the given
one; with `load_ema=true` it writes the moving average of a run's weights (ema_decay). `to-peft` writes the adapters of
a run with lora_rank as a folder that the package peft loads. Such a folder, also one written by peft, can be used as
HF_DIR and as load_parameters_path: its model's weights are merged with the adapters. `check` compares a checkpoint's
logits with those that transformers, if installed, computes from the folder. HF_DIR may be hf://ORG/NAME[@REVISION], a
model of the Hugging Face Hub.
"""

import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.load_weights import load_weights, undotted
from src.checkpoint.restore import restore_any
from src.checkpoint.resume import all_weights
from src.config.dataset_spec import all_synthetic
from src.config.load import from_yaml
from src.config.model_folders import has_tokenizer
from src.config.schema import KEYS, BatchKeys, Data, Model, Step
from src.config.yaml import BASE, file_name
from src.data.tokenizer import ByteTokenizer
from src.data.types import Tokenizer
from src.extras.evaluation.scoring import compute_logits
from src.extras.generation.loaded_model import inference_plan
from src.extras.hf.family import Family, Json
from src.extras.hf.folder import open_folder
from src.extras.hf.folder_tokenizer import folder_tokenizer
from src.extras.hf.hub import COMPANIONS, local_folder
from src.extras.hf.load import match_tensors
from src.extras.hf.model_keys import find_family, folder_model, model_yaml, read_model_keys
from src.extras.hf.peft import base_notes, save_adapters
from src.extras.hf.save import save_folder
from src.extras.hf.sections import section_of
from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer
from src.extras.hf.tokenizer_json import save_tokenizer
from src.model import params
from src.model.decoder import Decoder
from src.model.flops import count_params
from src.model.spec import ModelSpec, model_spec
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.step.state import abstract_state
from src.system.errors import UserError, first_few, say
from src.system.json_text import read_object
from src.system.version import title

USAGE = "\n".join(line.strip() for line in __doc__.splitlines() if line.startswith("    python"))

DTYPES = ("float32", "bfloat16", "float16")

# Copy of the config.json that a model.yml was made from, for entries without a key in base.yml.
ORIGINAL = "hf_config.json"
ODD_TEXTS = ("Hello  world ", " a", "a\n\n b\t", "don't 12345", "\u00e9\u4e2d\U0001f600 e\u0301", "<s>a</s> b")
ROWS, LENGTH = 2, 64  # maximum size of the random ids to compare
ENTRIES = ("bos_token_id", "eos_token_id", "pad_token_id")
LONGEST = "max_position_embeddings"


def main(argv: Sequence[str]) -> None:
    """Runs the command line `argv` on the CPU; raises UserError if wrong, or as `local_folder` and the commands do."""
    # Weights are read and written, and `check` computes few logits: no accelerator is needed.
    jax.config.update("jax_platforms", "cpu")
    if argv and argv[0] not in ("--help", "-h"):
        print(title(), flush=True)
    match list(argv):
        case [] | ["--help" | "-h", *_]:
            print(__doc__)
        case ["from-hf", hf_dir, out_dir]:
            from_hf(_folder(local_folder(hf_dir)), _folder(out_dir))
        case ["check", hf_dir, source]:
            source = _folder(source)
            checkpoint = source / "checkpoint" if (source / "model.yml").is_file() else source
            print(compare(_folder(local_folder(hf_dir)), checkpoint), flush=True)
        case ["to-peft", source, out_dir]:
            to_peft(_folder(source), _folder(out_dir))
        case ["to-hf", source, out_dir, *options] if all(re.fullmatch("dtype=.*|load_ema=true", it) for it in options):
            dtype = next((it.removeprefix("dtype=") for it in options if it.startswith("dtype=")), "")
            to_hf(_folder(source), _folder(out_dir), dtype, "load_ema=true" in options)
        case _:
            raise UserError(f"expected one of\n{USAGE}\ngot: {' '.join(argv)}")


def _folder(text: str) -> Path:
    if "://" in text:
        raise UserError(f"{text}: expected a folder on this machine, or on a mounted file system")
    return Path(file_name(text)).expanduser()


def from_hf(hf_dir: Path, out_dir: Path) -> None:
    """Converts the Hugging Face model in `hf_dir`; weights keep the folder's dtypes.

    Writes to `out_dir` model.yml, hf_config.json (a copy of its config.json), checkpoint/ and the tokenizer's files.
    Raises UserError unless `out_dir` is new or empty, and as `open_folder`, `match_tensors` and `load_weights` do.
    """
    folder = open_folder(hf_dir)
    family, keys = folder_model(folder)
    spec = model_spec(*_model_sections(keys))
    tree, roles = declared_weights(spec)
    dtypes: dict[Any, Any] = {}  # of the folder's tensors
    for piece, tensor in match_tensors(folder, tree):
        dtypes[piece.weight] = jnp.promote_types(dtypes.get(piece.weight, tensor.dtype), tensor.dtype)
    tree = params.nested({path: leaf.update(dtype=dtypes[path]) for path, leaf in params.by_path(tree).items()})
    _make_empty(out_dir)
    comment = f"# {family.architecture}, from {hf_dir.name}: what differs from base.yml.\n"
    (out_dir / "model.yml").write_text(comment + model_yaml(keys), encoding="utf-8")
    (out_dir / ORIGINAL).write_text(json.dumps(folder.config, indent=2) + "\n", encoding="utf-8")
    _copy_companions(hf_dir, out_dir)

    arrays, meta, messages = load_weights(str(hf_dir), tree)
    checkpointer = Checkpointer(out_dir / "checkpoint", max_to_keep=-1, async_save=False, compress=False)
    checkpointer.save(0, vars(params.Weights.split(arrays, roles)), meta)
    checkpointer.close()
    say(messages)
    keys_to_type = f"model_name={out_dir}/model.yml load_parameters_path={out_dir}/checkpoint"
    command = f"python -m src.train configs/base.yml {keys_to_type} dataset_path=TEXTS"
    say([f"{count_params(spec):,} parameters; to train them further: {command}"])


def to_hf(source: Path, out_dir: Path, dtype: str = "", ema: bool = False) -> None:
    """Writes a checkpoint as a Hugging Face folder, with tensors in `dtype` or in the checkpoint's dtypes.

    `source` is the output of `from_hf`, or a run's folder or one of its checkpoints; `ema` takes the moving averages of
    its weights. Raises UserError if `dtype` is unknown, if the checkpoint is missing, if no family can represent its
    model, if `out_dir` is not new or empty, or as `load_weights` and `save_folder` do.
    """
    if dtype and dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not one of {', '.join(DTYPES)}")
    keys, checkpoint, model_folder = _find(source)
    model, step, length = _model_sections(keys)
    original = _original_config(model_folder)
    family, hf = find_family(model, length, original.get("model_type", ""))
    tree, _ = declared_weights(model_spec(model, step, length))
    _make_empty(out_dir)  # before reading the weights, which takes minutes
    arrays, _, messages = load_weights(str(checkpoint), tree, ema, keep_dtypes=True)
    say(messages)
    notes: list[str] = []
    entries = _write_tokenizer(section_of("data", keys), model_folder, out_dir, notes)
    weights = {weight: np.asarray(leaf) for weight, leaf in params.by_path(arrays).items()}
    longest = {LONGEST: _longest(family, hf, original)} if LONGEST in original and LONGEST in hf else {}
    config_json = {**hf, **{name: original[name] for name in ENTRIES if name in original}, **longest, **entries}
    save_folder(out_dir, family, config_json, weights, model.vocab_size, jnp.dtype(dtype) if dtype else None)
    say([*notes, f"wrote {out_dir}"])


def to_peft(source: Path, out_dir: Path) -> None:
    """Writes a run's adapters as a folder that peft loads.

    Raises UserError as `to_hf`, `_load_adapters` and `save_adapters` do.
    """
    keys, checkpoint, model_folder = _find(source)
    model, step, length = _model_sections(keys)
    family, _ = find_family(model, length, _original_config(model_folder).get("model_type", ""))
    adapters, meta = _load_adapters(str(checkpoint))
    tree, _ = declared_weights(model_spec(model, step, length))
    shapes = {weight: leaf.shape for weight, leaf in params.by_path(tree).items()}
    _make_empty(out_dir)
    save_adapters(out_dir, family, shapes, model.vocab_size, adapters, meta["lora"])
    base = meta["lora"]["base"]
    say([f"wrote {out_dir}: adapters of {len(adapters)} weights for the model {base}", *base_notes(base)])


def _load_adapters(path: str) -> tuple[dict[tuple[str | int, ...], tuple[np.ndarray, np.ndarray]], dict[str, Any]]:
    """Loads the adapters of a run with `lora_rank`: `down` and `up` of each adapted weight, and the checkpoint's meta.

    Raises UserError if the run trained no adapters, or other weights as well.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def entries(meta: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        trained = [name for name in saved if name.startswith("trainable.")]
        if "lora" not in meta or (others := [name for name in trained if not name.startswith("trainable.lora.")]):
            what = f"whole weights with adapters: {first_few(others)}" if "lora" in meta else "no adapters (lora_rank)"
            raise UserError(f"{path} has {what}. `convert to-hf` exports the whole model")
        return {
            name: jax.ShapeDtypeStruct(saved[name]["shape"], saved[name]["dtype"], sharding=device) for name in trained
        }

    arrays, meta, _ = restore_any(path, entries, "the adapters")
    pairs: dict[Any, dict[Any, np.ndarray]] = {}
    for name, array in arrays.items():
        *weight, kind = undotted(name)[2:]  # after trainable.lora
        pairs.setdefault(tuple(weight), {})[kind] = np.asarray(array)
    return {weight: (pair["down"], pair["up"]) for weight, pair in pairs.items()}, meta


def _write_tokenizer(data: Data, model_folder: Path | None, out_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Writes a tokenizer's files, or adds a line to `notes` if it can't.

    Returns the token ids to add to config.json; {} without a tokenizer, or if the original config.json has them.
    """
    if data.tokenizer_type == "huggingface" or all_synthetic(data):
        path = Path(local_folder(data.tokenizer_path, weights=False)).expanduser()
        own_folder = (path if path.is_dir() else path.parent) if data.tokenizer_path else None
        for folder in filter(None, (model_folder, own_folder)):  # the run's own tokenizer is copied last and wins
            _copy_companions(folder, out_dir)
        if path.is_file():
            shutil.copyfile(path, out_dir / "tokenizer.json")
        if not has_tokenizer(out_dir):
            notes.append(f"{out_dir} has no tokenizer: there is none in {own_folder or model_folder or 'the sources'}")
        elif not _original_config(model_folder):  # without eos in config.json, transformers generates past it
            return _token_ids(folder_tokenizer(out_dir, sys.maxsize))
        return {}
    try:
        tokenizer = ByteTokenizer() if data.tokenizer_type == "byte" else SentencePieceTokenizer(data.tokenizer_path)
        save_tokenizer(out_dir, tokenizer)
    except UserError as error:
        notes.append(f"{out_dir} has no tokenizer, and its config.json no bos and eos: {error}")
        return {}
    return _token_ids(tokenizer)


def _token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": None}


def _longest(family: Family, hf: Json, original: Json) -> int:
    """Returns the export's max_position_embeddings, which some position types depend on.

    If the positions are unchanged, the original's limit applies; otherwise the one in `hf`, the export's config.json.
    """

    def positions(entries: Json) -> Json:
        keys = family.read_config(entries)
        others = [key for key in keys if KEYS[key].group != "Model: positions" and key != "trainable_position_size"]
        return {key: value for key, value in keys.items() if key not in others}

    try:
        return (original if positions(original) == positions(hf) else hf)[LONGEST]
    except UserError:  # the original belongs to another family
        return hf[LONGEST]


def declared_weights(spec: ModelSpec) -> tuple[params.Tree, params.Tree]:
    """Returns a model's abstract weights, on one device, and the role of each."""
    _, declarations = params.abstract(functools.partial(Decoder, spec))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = jax.tree.map(lambda leaf: leaf.update(sharding=device), params.values(declarations))
    return tree, params.roles(declarations)


def _model_sections(keys: Json) -> tuple[Model, Step, int]:
    """Returns the arguments of `model_spec`: the sections model and step, and the sequence length."""
    batch: BatchKeys = section_of("batch", keys)
    return section_of("model", keys), section_of("step", keys), batch.max_target_length


def _find(source: Path) -> tuple[dict[str, Any], Path, Path | None]:
    """Locates a model or run: its keys, the path of its checkpoint, and its model file's folder.

    The folder is None if there is no model file, or a shipped one. Raises UserError if `source` is neither a model nor
    a run, and as `local_folder` does.
    """
    if (source / "model.yml").is_file():
        keys = from_yaml((source / "model.yml").read_text(encoding="utf-8"))
        # The folder also has the tokenizer, if there is one.
        return keys | {"tokenizer_type": "huggingface"}, source / "checkpoint", source
    for run in (source, source.parent, source.parent.parent):
        if (run / "config.yml").is_file():
            keys = from_yaml((run / "config.yml").read_text(encoding="utf-8"))
            name = keys.get("model_name", "")
            model = Path(local_folder(name, weights=False)).expanduser()
            if name and model.is_dir():
                return keys, source, model
            # A plain name is a file in configs/models, a folder without a tokenizer to copy.
            return keys, source, model.parent if model.suffix == ".yml" else None
    expected = "expected the output of from-hf, or a run's folder or one of its checkpoints"
    raise UserError(f"there is no model.yml in {source}, and no config.yml in it or above it: {expected}")


def _original_config(model_folder: Path | None) -> dict[str, Any]:
    """Returns the text model's part of a folder's hf_config.json or config.json, with the top level's `ENTRIES`.

    {} if there is none. Raises UserError as `read_object` does.
    """
    for file in [model_folder / name for name in (ORIGINAL, "config.json")] if model_folder else ():
        if file.is_file():
            entries = read_object(file)
            tokens = {name: entries[name] for name in ENTRIES if name in entries}
            return {**tokens, **(entries.get("text_config") or entries)}
    return {}


def _make_empty(folder: Path) -> None:
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: name a new one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} can't be created: {error.strerror}") from error


def _copy_companions(source: Path, target: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


# ---- Comparing with transformers


class Agreement(NamedTuple):
    """How well logits agree at all positions; differences are in standard deviations of transformers' logits."""

    largest_difference: float
    mean_difference: float
    kl_divergence: float  # KL(theirs || ours) in nats, averaged over positions
    top_1: float  # fraction of positions with the same most likely token

    def __str__(self) -> str:
        return (
            f"largest difference  {self.largest_difference:.2e} of the logits' standard deviation\n"
            f"mean difference     {self.mean_difference:.2e}\n"
            f"KL divergence       {self.kl_divergence:.2e} nats\n"
            f"same likeliest id   {self.top_1:.1%} of positions"
        )


def compare(hf_dir: Path, checkpoint: Path) -> Agreement:
    """Compares a checkpoint's logits with transformers' for the folder, in float32, on the same random ids.

    Also prints the line of `compare_ids`. Raises UserError if transformers or torch is missing, or if the checkpoint
    has another model; also as `load_weights` and `folder_tokenizer` do.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        sentence = f"check needs transformers and torch, which are not installed ({error}): pip install both"
        raise UserError(sentence) from None
    # A table of learned positions may be shorter than LENGTH.
    length = min(LENGTH, read_model_keys(hf_dir).get("trainable_position_size", LENGTH))
    settings = ("dtype=float32", "weight_dtype=float32", "matmul_precision=highest", "remat_policy=none")
    config = resolve_config.load([str(BASE), f"model_name={hf_dir}", f"max_target_length={length}", *settings])
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (ROWS, length)).astype(np.int32)

    plan = inference_plan(config, make_layout(config.mesh, jax.devices()[:1]))
    weights, _, messages = load_weights(str(checkpoint), all_weights(abstract_state(plan)))
    say(messages)
    ours = compute_logits(plan, plan.split(weights), tokens)
    del weights
    disable_progress_bar()
    if has_tokenizer(hf_dir):
        say([compare_ids(hf_dir, config.model.vocab_size)])
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens).long()).logits.numpy()
    return agreement(ours, theirs)


def compare_ids(hf_dir: Path, vocab_size: int) -> str:
    """Returns a line on how many texts, the folder's own and some unusual ones, get other ids from transformers."""
    from transformers import AutoTokenizer

    files = [file for end in ("md", "jinja", "txt") for file in sorted(hf_dir.glob(f"*.{end}"))]
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    config = hf_dir / "tokenizer_config.json"
    named = read_object(config).values() if config.is_file() else ()
    spelled = [f"{text} x{text}" for text in named if isinstance(text, str) and len(text) < 50]
    texts = [*ODD_TEXTS, *spelled, *lines[:2000]]
    ours, theirs = folder_tokenizer(hf_dir, vocab_size), AutoTokenizer.from_pretrained(hf_dir)
    pairs = ((text, ours.encode_text(text).tolist(), theirs.encode(text, add_special_tokens=False)) for text in texts)
    differing = [f"{text!r}: {mine} here, {other} there" for text, mine, other in pairs if mine != other]
    first = f", such as {differing[0]}" if differing else ""
    return f"ids differ        in {len(differing)} of {len(texts)} texts{first}"


def agreement(ours_BTV: np.ndarray, theirs_BTV: np.ndarray) -> Agreement:
    """Compares our logits with transformers', both [B, T, V], over all positions."""
    ours_BTV, theirs_BTV = ours_BTV.astype(np.float64), theirs_BTV.astype(np.float64)
    difference = np.abs(ours_BTV - theirs_BTV) / theirs_BTV.std()
    ours, theirs = (np.asarray(jax.nn.log_softmax(jnp.asarray(x))) for x in (ours_BTV, theirs_BTV))
    return Agreement(
        largest_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        # Rounding may make it slightly negative.
        kl_divergence=max(0.0, float(np.sum(np.exp(theirs) * (theirs - ours), axis=-1).mean())),
        top_1=float(np.mean(ours_BTV.argmax(-1) == theirs_BTV.argmax(-1))),
    )
