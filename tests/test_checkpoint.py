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
