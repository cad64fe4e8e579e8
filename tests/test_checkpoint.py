"""Checkpoints: what is saved comes back, unreadable ones are set aside, configs are checked."""

import logging
import pathlib

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.checkpoint import CHECKPOINTS
from kvjax.checkpoint import Checkpoints
from kvjax.checkpoint import claim
from kvjax.checkpoint import read_parameters
from kvjax.checkpoint import saved_steps
from kvjax.errors import UserError


def state(value: float) -> dict:
    return dict(params={"w": jnp.full((64, 8), value), "segments": {0: {"b": jnp.arange(3.0)}}})


ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    state(0.0),
)


@pytest.fixture
def saved(tmp_path) -> epath.Path:
    """A workdir with checkpoints of steps 1, 2, 3, of which two are kept."""
    workdir = epath.Path(tmp_path)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(float(step)), position=10 * step)
    checkpoints.close()
    return workdir


def restore(workdir):
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    try:
        return checkpoints.restore(ABSTRACT), checkpoints.steps()
    finally:
        checkpoints.close()


def test_the_latest_comes_back(saved):
    (restored, position, step), steps = restore(saved)
    assert (step, position, steps) == (3, 30, [2, 3])
    jax.tree.map(np.testing.assert_array_equal, restored, state(3.0))


def test_nothing_there(tmp_path):
    assert restore(epath.Path(tmp_path)) == (None, [])


def array_files(step_directory: epath.Path) -> list[pathlib.Path]:
    files = [f for f in pathlib.Path(step_directory, "state").rglob("d/*") if f.is_file()]
    assert files
    return files


def corrupt(step_directory: epath.Path) -> None:
    """Overwrites every file that holds array data."""
    for file in array_files(step_directory):
        file.write_bytes(b"\0" * file.stat().st_size)


@pytest.mark.parametrize("how", ["overwritten", "truncated", "metadata gone"])
def test_an_unreadable_latest_is_set_aside(saved, how, caplog):
    latest = saved / CHECKPOINTS / "3"
    if how == "overwritten":
        corrupt(latest)
    elif how == "truncated":
        for file in array_files(latest):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        (latest / "state" / "_METADATA").unlink()
    with caplog.at_level(logging.WARNING, "kvjax"):
        (restored, position, step), steps = restore(saved)
    assert (step, position, steps) == (2, 20, [2])
    jax.tree.map(np.testing.assert_array_equal, restored, state(2.0))
    assert (saved / "unreadable-checkpoint-3").exists()  # nothing is lost
    assert "step 3 was moved" in caplog.text
    again = Checkpoints(saved / CHECKPOINTS, keep=2)
    again.save(3, state(33.0), position=30)  # the step is free again
    again.close()
    assert restore(saved)[0][2] == 3


def test_none_can_be_read(saved):
    for step in ("2", "3"):
        corrupt(saved / CHECKPOINTS / step)
    with pytest.raises(UserError, match="no checkpoint can be read.*step 3.*step 2"):
        restore(saved)
    assert (saved / CHECKPOINTS / "3").exists()


def test_half_written_checkpoints_are_not_found(saved):
    unfinished = saved / CHECKPOINTS / "4.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    assert restore(saved)[0][2] == 3


def abstract_parameters(dtype=jnp.float32, **shapes):
    """As saved, but for shapes given, on another device than they were saved from."""
    device = jax.devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = {"w": (64, 8), "segments": {0: {"b": (3,)}}} | shapes
    leaf = lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def test_parameters_alone(tmp_path):
    """Beside an optimizer state of which nothing is asked."""
    workdir = epath.Path(tmp_path)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(float(step)) | {"optimizer": jnp.ones(5)}, position=0)
    checkpoints.close()
    params = read_parameters(workdir / CHECKPOINTS, 1, abstract_parameters(jnp.bfloat16))
    assert params["w"].dtype == jnp.bfloat16 and params["w"].devices() == {jax.devices()[-1]}
    want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state(1.0)["params"])
    jax.tree.map(np.testing.assert_array_equal, params, want)


def test_parameters_of_another_model(saved):
    other = abstract_parameters(w=(64, 9), v=(1,))
    with pytest.raises(UserError, match="another model") as error:
        read_parameters(saved / CHECKPOINTS, 3, other)
    message = str(error.value)
    assert "w: checkpoint (64, 8), config (64, 9)" in message
    assert "v: checkpoint none, config (1,)" in message and "segments" not in message


def test_parameters_that_cannot_be_read(saved):
    corrupt(saved / CHECKPOINTS / "3")
    with pytest.raises(UserError, match=r"checkpoints/3 cannot be read .*steps \[2\]"):
        read_parameters(saved / CHECKPOINTS, 3, abstract_parameters())
    assert saved_steps(saved / CHECKPOINTS) == [2, 3]  # nothing is set aside


def test_listing_steps_changes_nothing(saved):
    unfinished = saved / CHECKPOINTS / "4.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    listing = lambda: sorted(pathlib.Path(saved).rglob("*"))
    before = listing()
    assert saved_steps(saved / CHECKPOINTS) == [2, 3]
    assert listing() == before
    assert saved_steps(saved / "nowhere") == [] and not (saved / "nowhere").exists()


def test_claim_names_what_differs(saved):
    path = saved / "config.json"
    with pytest.raises(UserError, match=r"has checkpoints and no config\.json"):
        claim(path, {"model": {"rank": 16, "dim": 32}, "name": "a"})
    path.write_text('{"model": {"rank": 16, "dim": 32}, "name": "a"}')
    claim(path, {"model": {"rank": 16, "dim": 32}, "name": "a"})
    with pytest.raises(UserError, match=r"model\.rank: there 16, now 8") as error:
        claim(path, {"model": {"rank": 8, "dim": 32}, "name": "a"})
    assert "dim" not in str(error.value)
    assert '"rank": 16' in path.read_text()


def test_claim_binds_only_where_there_are_checkpoints(tmp_path):
    path = epath.Path(tmp_path) / "config.json"
    claim(path, {"rank": 16})
    claim(path, {"rank": 8})
    assert '"rank": 8' in path.read_text()
