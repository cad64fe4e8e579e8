"""A trace has the requested steps and the names of the model's parts, and changes no number."""

import gzip
import json

from etils import epath
import pytest

from kvjax.foundation.errors import UserError
from kvjax.training import loop
from kvjax.workdir import metrics
from tests import runs

pytestmark = pytest.mark.usefixtures("one_device")


def test_a_trace_of_two_steps(source, tmp_path, capsys):
    config = runs.small_config(*source, num_steps=8, eval_every=5, checkpoint_every=5)
    loop.train(config, epath.Path(tmp_path / "plain"), trackers=())
    with pytest.raises(UserError, match="--profile_steps = -1: must be at least 0 and at most"):
        loop.train(config, epath.Path(tmp_path / "traced"), trackers=(), profile_steps=-1)
    loop.train(config, epath.Path(tmp_path / "traced"), trackers=(), profile_steps=2)
    for name in (metrics.METRICS, "config.txt", "config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "traced" / name).read_bytes()
    assert not list((tmp_path / "plain").glob("profile"))
    (folder,) = (tmp_path / "traced" / "profile" / "plugins" / "profile").iterdir()
    events = json.loads(gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes()))
    steps = [event for event in events["traceEvents"] if event.get("name") == "train"]
    assert [event["args"]["step_num"] for event in steps] == ["4", "5"]
    (raw,) = folder.glob("*.xplane.pb")
    assert {b"loss", b"muon"} <= {b for b in (b"loss", b"muon") if b"/" + b in raw.read_bytes()}
    assert f"trace of steps from 4 on: {tmp_path / 'traced' / 'profile'} (" in (
        capsys.readouterr().err
    )
    shares = metrics.read_records(epath.Path(tmp_path / "traced" / metrics.TIMING))[-1]
    assert shares["lost_profiling"] > 0


def test_too_few_steps_to_trace(source, tmp_path, capsys):
    config = runs.small_config(*source, num_steps=8, eval_every=5, stop_after=2)
    loop.train(config, epath.Path(tmp_path), trackers=(), profile_steps=2)
    start = "WARNING: --profile_steps = 2: no step was traced, since the run ended within"
    assert (
        f"{start} this process's first 3 steps, which are never traced\n" in capsys.readouterr().err
    )
