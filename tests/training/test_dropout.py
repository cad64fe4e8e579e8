"""Dropout in training: drawn anew at every step, the same for a run that was stopped."""

from etils import epath
import pytest

from kvjax.training import loop
from tests import runs
from tests.runs import records


@pytest.fixture
def config(source):
    made = runs.small_config(*source, num_steps=4, eval_every=2, checkpoint_every=2)
    made.model.dropout = 0.3
    return made


@pytest.mark.slow
def test_a_run_that_is_stopped_drops_what_it_would_have_dropped(config, tmp_path):
    whole, parted = epath.Path(tmp_path / "whole"), epath.Path(tmp_path / "parted")
    loop.train(config, whole)
    config.train.stop_after = 2
    loop.train(config, parted)
    config.train.stop_after = 0
    loop.train(config, parted)
    assert records(whole) == records(parted)

    def losses(workdir, key):
        return [r[key] for r in records(workdir) if key in r]

    config.model.dropout = 0.0
    none = epath.Path(tmp_path / "none")
    loop.train(config, none)
    pairs = list(zip(losses(whole, "loss"), losses(none, "loss"), strict=True))
    assert pairs[0][0] == pairs[0][1]  # outputs start at 0: there is nothing to drop yet
    assert all(a != b for a, b in pairs[2:])
