"""Non-finite losses, gradients and weights, and loss spikes, stop a run or are skipped."""

from etils import epath
import jax
import numpy as np
import pytest

from kvjax.config import TrainConfig
from kvjax.foundation.errors import UserError
from kvjax.training import loop, program
from kvjax.workdir import metrics
from tests import runs
from tests.runs import records

pytestmark = pytest.mark.usefixtures("one_device")


def corrupted(monkeypatch, steps, loss=np.nan):
    """Multiplies the loss of these steps, counted from 0, by `loss`."""
    real = program.mean_loss
    current = []
    monkeypatch.setattr(program, "mean_loss", lambda *a, **k: real(*a, **k) * factor())

    def factor():
        bad = jax.numpy.isin(current[-1], jax.numpy.asarray(steps))
        return jax.numpy.where(bad, loss, 1.0)

    step = program.train_step

    def step_noting_state(state, rows, **kwargs):
        current.append(state["step"])
        return step(state, rows, **kwargs)

    monkeypatch.setattr(program, "train_step", step_noting_state)


def state_of(workdir, step):
    from orbax.checkpoint import v1 as ocp

    return ocp.load(workdir / "checkpoints" / str(step), checkpointable_name="state")


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [np.nan, 50.0])
def test_bad_steps_are_skipped_and_counted(source, tmp_path, monkeypatch, loss):
    """A skipped step keeps parameters and optimizer, and consumes its batch; resuming is exact."""
    policy = dict(bad_steps="skip", spike_factor=3.0, num_steps=12, checkpoint_every=1)

    def config(**keys):
        return runs.small_config(*source, **policy, keep_checkpoints=99, **keys)

    corrupted(monkeypatch, [5, 6, 9], loss)
    loop.train(config(), epath.Path(tmp_path / "whole"))
    for stop_after in (6, 0):  # between two bad steps
        loop.train(config(stop_after=stop_after), epath.Path(tmp_path / "parts"))
    files = [(tmp_path / name / metrics.METRICS).read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    rows = {r["step"]: r for r in records(tmp_path / "whole") if "skipped_steps" in r}
    assert [rows[s]["skipped_steps"] for s in range(1, 13)] == [0] * 5 + [1, 2, 2, 2, 3, 3, 3]
    assert [rows[s]["bad_steps_in_a_row"] for s in (5, 6, 7, 8, 10)] == [0, 1, 2, 0, 1]
    assert ("loss" in rows[6]) == np.isfinite(loss) and rows[6]["bad"] == 1
    assert rows[12]["learning_rate"] == rows[1]["learning_rate"]  # its cooldown is 3 steps later
    states = {s: state_of(tmp_path / "whole", s) for s in (4, 5, 6, 7, 8)}
    for part in ("params", "optimizer"):
        for good, skipped in ((5, 6), (5, 7)):
            for x, y in zip(*(leaves(states[s][part]) for s in (good, skipped)), strict=True):
                np.testing.assert_array_equal(x, y)
        for good in (4, 8):
            pairs = zip(*(leaves(states[s][part]) for s in (5, good)), strict=True)
            assert all(np.any(x != y) for x, y in pairs if x.size > 1)
    assert states[7]["step"] == 7 and states[7]["bad"]["skipped"] == 2
    assert states[7]["bad"]["mean_loss"] == states[5]["bad"]["mean_loss"] > 0


def test_check_step():
    """A gradient may overflow with a finite loss; a spike exceeds a multiple of the mean."""
    skip, stop, spikes = dict(bad_steps="skip"), dict(bad_steps="stop"), dict(spike_factor=3.0)
    for policy, mean, loss, grad_norm, is_bad, after in (
        (skip, 1.5, 1.0, np.inf, True, 1.5),
        (skip, 1.5, 1.0, np.nan, True, 1.5),
        (skip, 1.5, np.inf, 1.0, True, 1.5),
        (skip, 1.5, 99.0, 1.0, False, 1.5 + 97.5 / 50),
        (skip | spikes, 1.5, 4.5, 1.0, False, 1.5 + 3.0 / 50),
        (skip | spikes, 1.5, 4.6, 1.0, True, 1.5),
        (stop | spikes, 1.5, 4.6, 1.0, True, 1.5),
        (stop | spikes, 1.5, 0.5, 1.0, False, 1.5 - 1.0 / 50),
        (stop | spikes, 0.0, 4.6, 1.0, False, 4.6),  # the first step
        (stop, 1.5, 4.6, 1.0, False, 1.5 + 3.1 / 50),
        (stop, 1.5, np.nan, 1.0, True, 1.5),
    ):
        bad = dict(skipped=np.int32(4), in_a_row=np.int32(2), mean_loss=np.float32(mean))
        verdict, new, reported = program.check_step(
            jax.tree.map(jax.numpy.asarray, bad),
            jax.numpy.float32(loss),
            jax.numpy.float32(grad_norm),
            TrainConfig(num_steps=1, batch_size=1, **policy),
        )
        assert bool(verdict) == is_bad
        skipped, in_a_row = 4 + (is_bad and policy["bad_steps"] == "skip"), 3 * is_bad
        assert new.pop("mean_loss") == pytest.approx(after, rel=1e-6)
        assert new == dict(skipped=skipped, in_a_row=in_a_row)
        expected = {}
        if policy != stop:
            expected |= dict(bad=is_bad, mean_loss=np.float32(mean))
        if policy["bad_steps"] == "skip":
            expected |= dict(skipped_steps=skipped, bad_steps_in_a_row=in_a_row)
        assert reported == expected


@pytest.mark.slow
@pytest.mark.parametrize("bad_steps", ["stop", "skip"])
def test_weights_that_are_not_finite_are_never_saved(source, tmp_path, monkeypatch, bad_steps):
    """The update of a step before a save is not finite, though loss and gradient are."""
    real = program.optax.apply_updates

    def config(**keys):
        return runs.small_config(*source, bad_steps=bad_steps, num_steps=9, **keys)

    loop.train(config(stop_after=3), epath.Path(tmp_path))
    monkeypatch.setattr(
        program.optax,
        "apply_updates",
        lambda *args: jax.tree.map(lambda x: x * jax.numpy.nan, real(*args)),
    )
    with pytest.raises(UserError, match=r"param_norm = nan: stopped. Checkpoints of steps \[3\]"):
        loop.train(config(checkpoint_every=4), epath.Path(tmp_path))
