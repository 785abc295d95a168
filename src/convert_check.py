"""Compares a checkpoint's logits with those that transformers computes of a Hugging Face folder."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from src import command_line
from src.checkpoint.load_weights import load_weights
from src.checkpoint.resume import all_weights
from src.config.yaml import BASE
from src.errors import UserError
from src.hf.model_keys import read_model_keys
from src.loaded_model import inference_plan
from src.parallel.mesh import make_layout
from src.scoring import compute_logits
from src.step.state import abstract_state

ROWS, LENGTH = 2, 64  # of random ids, at most


class Agreement(NamedTuple):
    """The agreement of logits at every position; differences are in standard deviations of transformers' logits."""

    largest_difference: float
    mean_difference: float
    kl_divergence: float  # KL(theirs || ours) in nats, a mean over positions
    top_1: float  # fraction of positions with the same likeliest token


def compare(hf_dir: Path, checkpoint: Path) -> Agreement:
    """Compares in float32, on the same random ids. Both models are held in memory.

    Raises UserError if torch and transformers are not installed, or the checkpoint is not of the folder's model.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        sentence = f"check compares with transformers on torch, which are not here ({error}): pip install both"
        raise UserError(sentence) from None
    # A table of positions may be shorter than base.yml's rows.
    length = min(LENGTH, read_model_keys(hf_dir).get("trainable_position_size", LENGTH))
    settings = ("dtype=float32", "weight_dtype=float32", "matmul_precision=highest", "remat_policy=none")
    config = command_line.load([str(BASE), f"model_name={hf_dir}", f"max_target_length={length}", *settings])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, length)).astype(np.int32)

    plan = inference_plan(config, make_layout(config.mesh, jax.devices()[:1]))
    weights, _, messages = load_weights(str(checkpoint), all_weights(abstract_state(plan)))
    for message in messages:
        print(message, flush=True)
    ours = compute_logits(plan, plan.split(weights), tokens)
    del weights
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens).long()).logits.numpy()
    return agreement(ours, theirs)


def agreement(ours_BTV: np.ndarray, theirs_BTV: np.ndarray) -> Agreement:
    """Compares two arrays of logits."""
    ours_BTV, theirs_BTV = ours_BTV.astype(np.float64), theirs_BTV.astype(np.float64)
    difference = np.abs(ours_BTV - theirs_BTV) / theirs_BTV.std()
    ours, theirs = (np.asarray(jax.nn.log_softmax(jnp.asarray(x))) for x in (ours_BTV, theirs_BTV))
    return Agreement(
        largest_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        # Rounding may leave it slightly negative.
        kl_divergence=max(0.0, float(np.sum(np.exp(theirs) * (theirs - ours), axis=-1).mean())),
        top_1=float(np.mean(ours_BTV.argmax(-1) == theirs_BTV.argmax(-1))),
    )


def describe_agreement(found: Agreement) -> str:
    """Returns the comparison as lines to print."""
    return (
        f"largest difference  {found.largest_difference:.2e} of the logits' standard deviation\n"
        f"mean difference     {found.mean_difference:.2e}\n"
        f"KL divergence       {found.kl_divergence:.2e} nats\n"
        f"same likeliest id   {found.top_1:.1%} of positions"
    )
