"""Records survive kills: half-written lines and lines of lost steps are dropped on resume."""

import json

from etils import epath

from kvjax import metrics


def test_resume_drops_later_and_half_written_records(tmp_path):
    workdir = epath.Path(tmp_path)
    writer = metrics.MetricsWriter(workdir, resume_step=0)
    for step in (1, 2, 3):
        writer.write(step, tokens=10 * step, loss=1 / step)
    writer.write_timing(3, tokens_per_second=5.0)
    writer.close()
    before = (workdir / metrics.METRICS).read_text().splitlines()
    with open(tmp_path / metrics.METRICS, "a") as file:
        file.write('{"step": 4, "lo')
    writer = metrics.MetricsWriter(workdir, resume_step=2)
    writer.write(3, tokens=30, loss=0.5)
    writer.close()
    after = (workdir / metrics.METRICS).read_text().splitlines()
    assert after[:2] == before[:2]
    assert json.loads(after[2]) == {"step": 3, "tokens": 30, "loss": 0.5}
    assert len(after) == 3
    assert metrics.read_records(workdir / metrics.TIMING) == []
    assert list((tmp_path / "events").glob("events*"))


def test_curves_are_a_picture(tmp_path):
    workdir = epath.Path(tmp_path)
    writer = metrics.MetricsWriter(workdir, resume_step=0)
    for step in (1, 2):
        writer.write(step, tokens=step, loss=2.0 / step)
    writer.write(2, tokens=2, validation_bpb=2.0)
    writer.close()
    path = metrics.draw_curves(workdir, title="test", yardstick=2.5)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().length > 5000
