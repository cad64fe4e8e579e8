"""Snapshots: the parameters of some steps of a run, kept for analysis."""

from etils import epath
import numpy as np
import pytest

from kvjax.convert import model as model_lib
from kvjax.training import loop
from kvjax.workdir import checkpoint, identity, metrics, storage, trained
from tests import runs

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def config(source):
    sizes = dict(num_steps=6, eval_every=6, checkpoint_every=4, keep_checkpoints=1)
    return lambda **keys: runs.small_config(*source, **sizes | keys)


@pytest.mark.slow
def test_snapshots_are_the_parameters_of_their_steps(config, tmp_path):
    """Snapshots include the first and last step, also of a resumed run."""
    plain, run = epath.Path(tmp_path / "plain"), epath.Path(tmp_path / "kept")
    for stop_after in (3, 0):
        loop.train(config(stop_after=stop_after, snapshot_every=2), run)
    loop.train(config(), plain)
    assert (run / metrics.METRICS).read_bytes() == (plain / metrics.METRICS).read_bytes()
    saved = trained.snapshots(run)
    assert [snapshot.step for snapshot in saved] == [0, 2, 4, 6]
    assert storage.steps(run / checkpoint.CHECKPOINTS) == [6]
    models = [model_lib.TrainedModel(snapshot) for snapshot in saved]
    last = model_lib.open(str(plain))
    for path in last.parameters():
        weights = [model.read(path) for model in models]
        np.testing.assert_array_equal(weights[-1], last.read(path))
        # The first step's rate is 0, and zero output projections give queries no gradient.
        assert len({w.tobytes() for w in weights[1:]}) == 3, path
    assert set(storage.shapes(saved[0].checkpoints / "0" / "state")) == {
        "step",
        *(".".join(map(str, ("params", *path))) for path in last.parameters()),
    }
    assert trained.snapshots(plain) == [] and not (plain / checkpoint.SNAPSHOTS).exists()


def test_snapshots_without_checkpoints_are_removed_or_set_aside(tmp_path):
    """A run that took no step has nothing to keep; records are set aside with their snapshots."""
    workdir = epath.Path(tmp_path)
    (workdir / checkpoint.SNAPSHOTS / "0").mkdir(parents=True)
    identity.set_aside_earlier_run(workdir)
    assert not (workdir / checkpoint.SNAPSHOTS).exists()
    (workdir / checkpoint.SNAPSHOTS / "0").mkdir(parents=True)
    (workdir / metrics.METRICS).write_text("{}\n")
    identity.set_aside_earlier_run(workdir)
    assert (workdir / "earlier-run" / checkpoint.SNAPSHOTS / "0").exists()
    assert not (workdir / checkpoint.SNAPSHOTS).exists()
