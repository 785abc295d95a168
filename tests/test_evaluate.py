"""The loss of an evaluation against one computed from the checkpoint and the text files with NumPy alone."""

import math
import random
import re

import numpy as np
import pytest

from src.config.dataset_spec import train_specs
from src.config.load import to_yaml
from src.data.open import open_eval_sets
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from src.extras.evaluation import evaluate
from src.run.resolve_config import load
from src.system.errors import UserError
from tests import runs

LAYERS = {"base_num_decoder_layers": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of 31 bytes, which are 32 targets each, so that no row of 64 ends within one."""
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(3)
    for n in range(37):
        (folder / f"{n}.txt").write_text(" ".join(rng.choices(("alpha", "beta", "zeta"), k=9))[:31])
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus, texts):
    """The folder of a short run, and its evaluation's loss."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    keys = {"base_output_directory": folder.parent, "dataset_path": corpus, "eval_dataset_path": texts}
    result = runs.run_here(**keys, **LAYERS, steps=5, eval_interval=5)
    return folder, result.eval_metrics["eval_loss"]


# ---- A decoder in NumPy: RMSNorm, rotary positions, SwiGLU, as configs/base.yml describes it, in float64


def norm(x_TD, scale_D):
    return x_TD / np.sqrt(np.mean(x_TD**2, axis=-1, keepdims=True) + 1e-5) * scale_D


def rotate(x_TNH):
    """Turns the pair (h, h + H/2) at position t by t / 10000**(2h/H)."""
    T, _, H = x_TNH.shape
    turn_TH = np.exp(1j * np.arange(T)[:, None] / 10_000 ** (np.arange(H // 2) / (H // 2)))
    turned = (x_TNH[..., : H // 2] + 1j * x_TNH[..., H // 2 :]) * turn_TH[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(x_TD, query, key, value, out):
    q_NTH, k_NTH = (rotate(np.einsum("td,dnh->tnh", x_TD, w)).transpose(1, 0, 2) for w in (query, key))
    scores_NTS = q_NTH @ k_NTH.transpose(0, 2, 1) / np.sqrt(q_NTH.shape[-1])
    scores_NTS[:, ~np.tri(len(x_TD), dtype=bool)] = -np.inf
    weights_NTS = np.exp(scores_NTS - scores_NTS.max(axis=-1, keepdims=True))
    weights_NTS /= weights_NTS.sum(axis=-1, keepdims=True)
    return np.einsum("nts,sd,dnh,nhe->te", weights_NTS, x_TD, value, out, optimize=True)


def feed_forward(x_TD, wi, wo):
    gate_TF, up_TF = np.einsum("td,daf->atf", x_TD, wi)
    return gate_TF / (1 + np.exp(-gate_TF)) * up_TF @ wo


def losses_of(ids, weights):
    """The loss in nats of each id but the first."""
    x_TD = weights["embedding"][ids[:-1]]
    for layer in range(2):
        w = {
            name.removeprefix("segments.0.0."): x[layer] for name, x in weights.items() if name.startswith("segments.")
        }
        projections = (w[f"attention.{name}"] for name in ("query", "key", "value", "out"))
        x_TD = x_TD + attention(norm(x_TD, w["attention_norm.scale"]), *projections)
        x_TD = x_TD + feed_forward(norm(x_TD, w["feed_forward_norm.scale"]), w["feed_forward.wi"], w["feed_forward.wo"])
    logits_TV = norm(x_TD, weights["final_norm.scale"]) @ weights["output"][:, :258]
    return np.log(np.exp(logits_TV).sum(axis=-1)) - logits_TV[np.arange(len(ids) - 1), ids[1:]]


def test_the_loss_is_that_of_each_document_on_its_own(trained, texts):
    folder, eval_loss = trained
    prefix = "trainable."
    weights = {
        name.removeprefix(prefix): array.astype(np.float64)
        for name, array in runs.saved_arrays(folder, 5).items()
        if name.startswith(prefix)
    }
    documents = [[256, *path.read_bytes(), 257] for path in texts.iterdir()]
    losses = np.concatenate([losses_of(np.array(ids), weights) for ids in documents])
    assert eval_loss == pytest.approx(losses.mean(), rel=1e-5)
    assert abs(eval_loss - math.log(258)) > 1


# ---- However it is computed, it is the same


def test_the_data_are_named(trained, corpus, texts, capsys):
    run, _ = trained
    evaluate.main([str(run), "eval_steps=1"])
    assert f"evaluating on text: {texts}, 37 documents\n" in capsys.readouterr().out
    named = f"eval_datasets=[{{name: a, dataset_path: {corpus}, eval_steps: 1}}]"
    evaluate.main([str(run), named, "dataset_path=elsewhere"])
    printed = capsys.readouterr().out
    assert f"evaluating on a: text: {corpus}, 60 documents\n" in printed
    assert re.search("dataset_path=elsewhere .* has no effect: src.evaluate reads it only with", printed)


def test_one_evaluation_has_nothing_to_continue_after(trained, capsys):
    """Nor is a whole epoch refused, as it is in a run that continues after the last evaluation."""
    run, _ = trained
    losses = [evaluate.main([str(run), "eval_steps=-1", *mode]) for mode in ([], ["eval_mode=rolling"])]
    assert losses[0] == losses[1]
    assert "eval_mode=rolling (on the command line) has no effect: it is for src.train" in capsys.readouterr().out


def test_a_held_out_part_is_named_without_reading_its_files_again(corpus, monkeypatch):
    config = load([runs.BASE, f"dataset_path={corpus}"])
    (data,) = open_eval_sets(InputSpec.of(config, make_tokenizer(config.data, 32_000)), config.evaluation)
    monkeypatch.setattr(type(data.source), "fingerprint", None)
    (spec,) = train_specs(config.data)
    assert re.fullmatch(rf"text: {corpus}, \d documents? \(0.02 of the documents\)", evaluate._described(spec, data))


def test_a_folder_and_a_glob_of_the_same_files_are_the_same_data(corpus, tmp_path):
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, **LAYERS}
    runs.run_here(**keys, steps=1)
    (tmp_path / "saved").symlink_to("run/checkpoints")  # under another name
    for weights in ("run", "saved"):
        argv = runs.arguments(**keys | {"dataset_path": f"{corpus}/*.txt"}, load_parameters_path=tmp_path / weights)
        with pytest.raises(UserError, match=r"held nothing out .eval_interval=-1"):
            evaluate.main(argv)


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("tokens", "folder", ["packing=false"]),
        ("tokens", "folder", ["max_target_length=256"]),
        ("text", "one.txt", ["max_document_bytes=100"]),
        ("text", "one.txt", ["eval_fraction=0.5"]),
    ],
)
def test_a_part_held_out_is_cut_as_the_run_cut_it(kind, name, changes, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "one.txt").write_text("a text")
    argv = [runs.BASE, f"dataset_type={kind}", f"dataset_path={tmp_path / name}", "vocab_size=258"]
    trained = load([*argv, "eval_interval=5"])
    (tmp_path / "config.yml").write_text(to_yaml(trained))
    evaluate._check_held_out(tmp_path, load(argv))
    with pytest.raises(
        UserError, match=rf"held out a part of its data by \w+=.*: {changes[0]} would select other data"
    ):
        evaluate._check_held_out(tmp_path, load([*argv, *changes]))
    evaluate._check_held_out(tmp_path, load([*argv, *changes, f"eval_dataset_path={tmp_path / name}"]))


@pytest.mark.parametrize(
    ("trained", "measured", "refused"),
    [
        ("train", "train[:50%]", True),
        ("train[:10%]+test", "test", True),
        ("all", "train", True),
        ("train[:10%]", "train[:10%]", False),
        ("train", "test", False),
        ("train[:10%]+test", "validation", False),
    ],
)
def test_a_split_that_shares_examples_with_the_runs_is_refused(trained, measured, refused, tmp_path):
    argv = [runs.BASE, "dataset_type=tfds", f"dataset_path={tmp_path}", "dataset_name=stories", "vocab_size=258"]
    (tmp_path / "config.yml").write_text(to_yaml(load([*argv, "eval_interval=5", f"train_split={trained}"])))
    config = load([*argv, f"train_split={measured}"])
    if not refused:
        return evaluate._check_held_out(tmp_path, config)
    with pytest.raises(UserError, match=f"train_split={re.escape(measured)} would hold out another part"):
        evaluate._check_held_out(tmp_path, config)


def test_data_that_are_read_again_are_said(trained, capsys):
    """As often as there are more tokens than in an epoch, but for documents that are not finished."""

    def tokens(**keys):
        evaluate.main([str(trained[0]), *(f"{key}={value}" for key, value in keys.items())])
        said = capsys.readouterr().out
        return int(re.search(r"eval_tokens (\d+)", said)[1]), re.search(r"the data was read ([\d.]+) times", said)

    epoch, nothing = tokens(eval_steps=-1)
    assert nothing is None
    taken, said = tokens(eval_steps=8)
    assert taken > 2 * epoch
    assert float(said[1]) == pytest.approx(taken / epoch, abs=0.3)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"packing": "false"}, id="a document per row"),
        pytest.param({"eval_per_device_batch_size": 3}, id="another batch size"),
        pytest.param(
            {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 2, "ici_tensor_parallelism": 2}, id="another mesh"
        ),
        pytest.param({"num_vocab_tiling": 4}, id="in tiles"),
        pytest.param({"data_shuffle_seed": 5}, id="another order"),
    ],
)
def test_every_way_gives_the_same_loss(keys, trained, corpus, texts, tmp_path):
    """A rate of next to nothing leaves the weights as they are loaded."""
    folder, eval_loss = trained
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "eval_dataset_path": texts, **keys}
    keys |= {"load_parameters_path": folder, "learning_rate": 1e-30, "enable_checkpointing": "false"}
    result = runs.run_here(**keys, **LAYERS, steps=1, eval_interval=1)
    assert result.eval_metrics["eval_loss"] == pytest.approx(eval_loss, rel=1e-5)
    assert result.eval_metrics["eval_perplexity"] == math.exp(result.eval_metrics["eval_loss"])
