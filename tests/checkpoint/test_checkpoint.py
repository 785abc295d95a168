import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.format import HostArray
from src.model.params import ROLES
from src.system.errors import UserError
from tests.checkpoint.arrays import abstract, make_mesh, make_values, place, restore_step, same


def checkpointer(directory, max_to_keep=3, async_save=True):
    return Checkpointer(directory, max_to_keep=max_to_keep, async_save=async_save)


def save_steps(directory, steps, mesh, **kwargs):
    """Checkpoints of `make_values(step)` in `directory`."""
    saver = checkpointer(directory, **kwargs)
    for step in steps:
        saver.save(step, place(make_values(step), mesh), {"loss": step / 8, "note": "é"})
    finish(saver)


def finish(saver):
    """What a run does at its end."""
    saver.wait()
    saver.prune()
    saver.close()


def steps_in(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 2, 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, mesh):
    """checkpoints/ with steps 10, 20 and 30, not to be changed."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    save_steps(directory, [10, 20, 30], mesh)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """The same, for one test to damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@pytest.fixture(scope="module")
def wanted(mesh):
    return abstract(place(make_values(0), mesh))


# ---- Save and restore


@pytest.mark.parametrize("async_save", [True, False])
def test_a_state_comes_back_bit_for_bit_where_it_was(async_save, tmp_path, mesh, wanted):
    save_steps(tmp_path, [5], mesh, async_save=async_save)
    restorer = checkpointer(tmp_path)
    state, meta, messages = restorer.restore_latest(wanted)
    assert same(state, make_values(5))
    assert jax.tree.all(jax.tree.map(lambda x, w: x.sharding == w.sharding, state, wanted))
    assert meta == {"loss": 5 / 8, "note": "é"}
    assert messages == []


@pytest.mark.parametrize(
    ("shape", "devices", "spec"),
    [
        ((8, 1, 1), 8, lambda value: P("data") if np.ndim(value) else P()),
        ((1, 4, 2), 8, lambda value: P(None, "fsdp", "tensor") if np.ndim(value) == 3 else P()),
        ((1, 1, 1), 1, lambda value: P()),
    ],
)
def test_a_state_comes_back_on_another_mesh(shape, devices, spec, saved):
    other = place(make_values(0), make_mesh(shape, jax.devices()[:devices]), spec)
    state, _, _ = checkpointer(saved).restore_latest(abstract(other))
    assert same(state, make_values(30))
    assert jax.tree.all(jax.tree.map(lambda x, w: x.sharding == w.sharding, state, other))


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path, mesh, wanted):
    saver = checkpointer(tmp_path)
    state = place(make_values(5), mesh)
    saver.save(5, state, {})
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state))
    saver.close()
    state, _, _ = checkpointer(tmp_path).restore_latest(wanted)
    assert same(state, make_values(5))


def test_a_dtype_that_the_configuration_changed_is_cast(saved, wanted):
    wanted = {**wanted, "stats": {"bias": wanted["stats"]["bias"].update(dtype=jnp.bfloat16)}}
    state, _, messages = checkpointer(saved).restore_latest(wanted)
    bias = state["stats"]["bias"]
    assert bias.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(bias), make_values(30)["stats"]["bias"].astype(jnp.bfloat16))
    assert messages == []


def test_nothing_is_there_before_the_first_save(tmp_path, wanted):
    new = checkpointer(tmp_path / "run" / "checkpoints")
    assert new.restore_latest(wanted) is None
    new.wait()
    new.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("max_to_keep", "kept"), [(1, [3]), (2, [2, 3]), (-1, [1, 2, 3])])
def test_the_oldest_are_deleted(max_to_keep, kept, tmp_path, mesh):
    save_steps(tmp_path, [1, 2, 3], mesh, max_to_keep=max_to_keep)
    assert steps_in(tmp_path) == kept


def test_a_restored_run_saves_on(directory, mesh, wanted):
    resumed = checkpointer(directory)
    resumed.restore_latest(wanted)
    resumed.save(40, place(make_values(40), mesh), {})
    finish(resumed)
    assert steps_in(directory) == [20, 30, 40]


# ---- Damage

DATA, INDEX, META = "data", "index", "meta"


def files_of(step_folder):
    """Each file of a checkpoint with its role; None where nothing that is restored stands in it."""
    for path in sorted(path for path in step_folder.rglob("*") if path.is_file()):
        relative = path.relative_to(step_folder).as_posix()
        if relative.startswith("state/ocdbt.process_0/d/"):
            yield path, DATA
        elif relative == "state/manifest.ocdbt" or relative.startswith("state/d/"):
            yield path, INDEX
        else:
            yield path, META if relative == "meta/metadata" else None


def delete(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 16])


def flip_a_bit(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 16] ^= 4
    path.write_bytes(contents)


@pytest.mark.parametrize("damage", [delete, truncate, flip_a_bit])
def test_a_damaged_file_is_noticed_and_an_older_checkpoint_restored(damage, directory, saved, wanted):
    """Some files, and parts of the data files, hold nothing that is restored: damage there may go unnoticed."""
    noticed = []
    for path, role in list(files_of(directory / "30")):
        damage(path)
        state, _, messages = checkpointer(directory).restore_latest(wanted)
        if messages:
            assert same(state, make_values(20))
            assert messages[0].startswith("checkpoint 30 is passed over: ")
            noticed.append(role)
        else:
            assert same(state, make_values(30))
        shutil.copy(saved / path.relative_to(directory), path)
    assert set(noticed) >= {DATA, INDEX, META}


@pytest.mark.parametrize("name", ["trainable.embed", "opt.1.nu.layers.0.w", "step", "data_position"])
def test_a_value_that_changed_in_a_well_formed_file_is_noticed(name, directory, wanted):
    """The lowest bit of one element; TensorStore, and so Orbax, finds nothing wrong with the file."""
    kvstore = {"driver": "ocdbt", "base": f"file://{directory}/30/state/", "path": f"{name}/"}
    store = ts.open({"driver": "zarr", "kvstore": kvstore}).result()
    values = np.array(store.read().result())
    values.reshape(-1).view(np.uint8)[0] ^= 1
    store.write(values).result()

    state, _, messages = checkpointer(directory).restore_latest(wanted)
    assert same(state, make_values(20))
    assert f"checkpoint 30 is passed over: values differ from those saved, in {name}." in messages[0]


def test_an_edited_meta_is_noticed(directory, wanted):
    metadata = directory / "30" / "meta" / "metadata"
    metadata.write_text(metadata.read_text().replace('"loss": 3.75', '"loss": 2.75'))
    _, meta, messages = checkpointer(directory).restore_latest(wanted)
    assert meta["loss"] == 20 / 8
    assert "meta/metadata" in messages[0]


def test_the_step_of_a_damaged_checkpoint_is_saved_again(directory, mesh, wanted):
    for step in (20, 30):
        delete(directory / str(step) / "state" / "manifest.ocdbt")
    resumed = checkpointer(directory)
    _, _, messages = resumed.restore_latest(wanted)
    assert [message.split(":")[0] for message in messages[:2]] == [
        "checkpoint 30 is passed over",
        "checkpoint 20 is passed over",
    ]
    assert steps_in(directory) == [10, 20, 30]
    resumed.save(20, place(make_values(20), mesh), {})
    resumed.wait()
    assert steps_in(directory) == [10, 20]
    assert {path.name for path in directory.iterdir()} == {"10", "20", "20.damaged", "30.damaged"}
    resumed.close()
    resumed.save(30, place(make_values(30), mesh), {})
    resumed.close()
    assert steps_in(directory) == [10, 20, 30]
    state, _, messages = checkpointer(directory).restore_latest(wanted)
    assert same(state, make_values(30))
    assert messages == []


def test_where_none_is_good_all_are_kept_and_each_is_explained(directory, wanted):
    for step in (10, 20, 30):
        flip_a_bit(directory / str(step) / "meta" / "metadata")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be restored") as error:
        checkpointer(directory).restore_latest(wanted)
    assert all(f"\n  {step}: " in str(error.value) for step in (10, 20, 30))
    assert steps_in(directory) == [10, 20, 30]


# ---- Another configuration


def test_other_shapes_are_an_error_that_lists_both(directory, mesh):
    wider = make_values(0, embed=96)
    wider["stats"] = {}
    wider["trainable"]["layers"][0]["gate"] = np.ones(3, np.float32)
    with pytest.raises(UserError) as error:
        checkpointer(directory).restore_latest(abstract(place(wider, mesh)))
    lines = str(error.value).splitlines()
    assert f"{directory}/30" in lines[0]
    assert "  trainable.embed: [32, 64] in the checkpoint, [32, 96] in the configuration" in lines
    assert "  trainable.layers.0.gate: absent in the checkpoint, [3] in the configuration" in lines
    assert "  stats.bias: [8] in the checkpoint, absent in the configuration" in lines
    assert not any("step:" in line or "data_position" in line for line in lines)
    assert steps_in(directory) == [10, 20, 30]


def test_a_host_array_has_the_shape_it_was_saved_in_however_devices_shared_it_out(saved):
    """So the data position of any number of rows is restored on any mesh."""
    values, mesh = make_values(30), make_mesh((1, 2, 4))
    wanted = abstract(place(values, mesh)) | {"data_position": HostArray(NamedSharding(mesh, P()))}
    state, meta, messages = checkpointer(saved).restore_latest(wanted)
    assert isinstance(state["data_position"], np.ndarray)
    assert same(state, values)
    assert meta["loss"] == 30 / 8
    assert messages == []


# ---- Another run's checkpoint


def weights_of(state):
    return {role: state[role] for role in ROLES}


@pytest.mark.parametrize(("place_in_run", "step"), [("", 30), ("checkpoints", 30), ("checkpoints/20", 20)])
def test_weights_come_from_a_run_its_checkpoints_or_one_of_them(place_in_run, step, saved, wanted):
    state, meta, messages = restore_step(saved.parent / place_in_run, weights_of(wanted))
    values = make_values(step)
    assert same(state, {part: values[part] for part in ("trainable", "frozen", "stats")})
    assert meta["loss"] == step / 8
    assert messages == [f"restored trainable, frozen, stats from checkpoint {step} of {saved}."]


def test_a_path_may_be_relative_and_have_any_characters(saved, wanted, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "a b%20#?é" / "checkpoints")
    monkeypatch.chdir(tmp_path)
    state, _, _ = restore_step("a b%20#?é", weights_of(wanted))
    assert same(state["trainable"], make_values(30)["trainable"])


def test_weights_of_a_run_with_another_optimizer_and_batch(saved, wanted):
    wanted = {**weights_of(wanted), "step": wanted["step"]}
    state, _, _ = restore_step(saved, wanted)
    assert same(state["trainable"], make_values(30)["trainable"])


def test_the_full_state_comes_from_another_run(saved, wanted):
    state, _, _ = restore_step(saved, wanted)
    assert same(state, make_values(30))


def test_weights_come_from_the_newest_good_checkpoint_of_a_run_that_is_left_as_it_is(directory, wanted):
    truncate(directory / "30" / "meta" / "metadata")
    state, _, messages = restore_step(directory, weights_of(wanted))
    assert same(state["trainable"], make_values(20)["trainable"])
    assert "checkpoint 30" in messages[0]
    assert "checkpoint 20" in messages[1]
    assert steps_in(directory) == [10, 20, 30]


def test_a_damaged_step_that_was_asked_for_is_an_error(directory, wanted):
    truncate(directory / "30" / "meta" / "metadata")
    with pytest.raises(UserError, match="can be restored:\n  30: "):
        restore_step(directory / "30", wanted)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(directory, wanted):
    with pytest.raises(UserError, match=rf"no checkpoint at {directory}/7: .* There are 30, 20, 10 in {directory}$"):
        restore_step(directory / "7", wanted)


@pytest.mark.parametrize("name", ["absent", "empty", "empty/30"])
def test_a_path_without_a_checkpoint_is_an_error(name, tmp_path, wanted):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no checkpoint at .*: expected a run's folder"):
        restore_step(tmp_path / name, wanted)
