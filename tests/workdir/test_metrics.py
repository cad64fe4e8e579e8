"""Records survive kills: partial lines and records beyond the checkpoint are dropped on resume."""

import errno
import json
import types

from etils import epath
from matplotlib.figure import Figure
import pytest

from kvjax.foundation import json_text
from kvjax.workdir import metrics
from kvjax.workdir.identity import write_identity
from tests import damage


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
    third = json_text.without_checksum(json.loads(after[2]))
    assert third == {"step": 3, "tokens": 30, "loss": 0.5}
    assert len(after) == 3
    assert metrics.read_records(workdir / metrics.TIMING) == []
    assert list((tmp_path / "events").glob("events*"))


# Invalid records.
OTHER = [b"\xff\x00\x80 binary", b"[1, 2]", b'"text"', b'{"loss": 1.0}', b"[" * 100_000]
OTHER += [b'{"step": "two", "loss": 1.0}', b'{"step": 2, "tokens": 20, "loss": "high"}']
OTHER += [b'{"step": 2, "tokens": 20, "loss": null}', b"1" * 5_000, b""]
OTHER += [b'{"step": 2, "tokens": 20, "crc32": 1}']  # whose checksum is another


@pytest.mark.parametrize("name", [metrics.METRICS, metrics.TIMING])
def test_lines_that_are_no_records_are_set_aside(tmp_path, capsys, name):
    good = [b'{"step": 1, "tokens": 10, "loss": 2.0}', b'{"step": 3, "tokens": 30, "loss": 1.0}']
    for i, line in enumerate(OTHER):
        workdir = epath.Path(tmp_path) / str(i)
        workdir.mkdir()
        content = b"\n".join([good[0], line, good[1], b'{"step": 4, "lo'])
        (workdir / name).write_bytes(content)
        metrics.MetricsWriter(workdir, resume_step=3).close()
        assert (workdir / f"unreadable-{name}").read_bytes() == content
        warning = capsys.readouterr().err
        assert warning.startswith(f"WARNING: {workdir / name}: line 2 is no record") and (
            warning.count("\n") == 1 and len(warning) < 1000
        )
        assert metrics.read_records(workdir / name) == [json.loads(line) for line in good]
        metrics.MetricsWriter(workdir, resume_step=3).close()
        assert not capsys.readouterr().err and len(list(workdir.glob("unreadable-*"))) == 1
    metrics.draw_curves(workdir, title="test", yardstick=2.0)


def test_a_flipped_bit_is_noticed_or_harmless(tmp_path):
    """A flipped line end of the last record is no partial line."""
    workdir, file = epath.Path(tmp_path), tmp_path / metrics.METRICS
    writer = metrics.MetricsWriter(workdir, resume_step=0)
    for step in (1, 2):
        writer.write(step, tokens=10 * step, loss=1 / step)
    writer.close()
    content, records = file.read_bytes(), metrics.read_records(epath.Path(file))
    for broken in damage.flipped(content, step=3):
        file.write_bytes(broken)
        read, reason = metrics.read_checked(epath.Path(file))
        assert reason or read == records, broken


def test_a_file_that_is_moved_or_removed_is_noticed(tmp_path):
    """Records of a deleted file are saved beside it."""
    changes = ("move", metrics.METRICS), ("replace", metrics.TIMING), ("remove", metrics.METRICS)
    for change, name in changes:
        (tmp_path / change).mkdir()
        writer = metrics.MetricsWriter(epath.Path(tmp_path / change), resume_step=0)
        writer.write(1, loss=2.0)
        writer.write_timing(1, loss=2.0)
        writer.flush()
        rescued = tmp_path / change / "moved"
        if change == "move":
            (tmp_path / change / name).rename(rescued)
        else:
            (tmp_path / change / name).unlink()
            rescued = tmp_path / change / f"replaced-{name}"
        if change == "replace":
            (tmp_path / change / name).write_text("")
        with pytest.raises(OSError, match=f"{name} was moved or removed during the run"):
            writer.flush()
        writer.close()
        assert metrics.read_records(epath.Path(rescued)) == [dict(step=1, loss=2.0)]


def test_a_record_that_has_no_room_is_an_error(tmp_path):
    writer = metrics.MetricsWriter(epath.Path(tmp_path), resume_step=0)
    for name, write in ((metrics.METRICS, writer.write), (metrics.TIMING, writer.write_timing)):
        file = writer._files[name]
        file._file = types.SimpleNamespace(write=lambda line: len(line) - 1, close=file._file.close)
        with pytest.raises(OSError, match=f"no room for a record in {tmp_path / name}") as error:
            write(1, tokens=2)
        assert error.value.errno == errno.ENOSPC
    writer.close()


# Titles that are no TeX, or that the font lacks glyphs for.
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "tokens, label, title",
    [(1, "2", "lr $x_$"), (102_400, "200k", "$\\frac{$ 日本 {a}^% \t # \x7f")],
)
def test_curves_are_a_picture(tmp_path, monkeypatch, tokens, label, title):
    """Tick labels abbreviate numbers of tokens, which would overlap."""
    drawn, real = [], Figure.savefig

    def save_noted(figure, *args, **options):
        drawn.append(figure)
        real(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save_noted)
    workdir = epath.Path(tmp_path)
    writer = metrics.MetricsWriter(workdir, resume_step=0)
    for step in (1, 2):
        writer.write(step, tokens=step * tokens, loss=2.0 / step)
        writer.write(step, tokens=step * tokens, validation_bpb=2.0)
    writer.close()
    path = metrics.draw_curves(workdir, title=title, yardstick=2.5)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().length > 5000
    for axes in drawn[0].axes:
        labels = [text.get_text() for text in axes.get_xticklabels()]
        assert label in labels and max(map(len, labels)) <= 5, labels
        assert all(text.isdigit() or text[-1] in "kMG" for text in labels), labels  # whole numbers


def test_a_workdir_in_a_bucket(bucket):
    (bucket / "runs").mkdir()
    workdir = epath.Path("gs://runs/one")
    write_identity(workdir / "config.json", {"rank": 16})
    writer = metrics.MetricsWriter(workdir, resume_step=0)
    writer.write(1, tokens=10, loss=2.0)
    writer.write(2, tokens=20, loss=1.0, validation_bpb=2.0)
    writer.close()
    assert [r["step"] for r in metrics.read_records(workdir / metrics.METRICS)] == [1, 2]
    writer = metrics.MetricsWriter(workdir, resume_step=1)
    writer.write(2, tokens=20, loss=1.5, validation_bpb=2.5)
    writer.flush()
    lines = (bucket / "runs" / "one" / metrics.METRICS).read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.0, 1.5]
    metrics.draw_curves(workdir, title="test", yardstick=None)
    names = {path.name for path in (bucket / "runs" / "one").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "timing.jsonl", "events", "curves.png"}


def test_a_bucket_that_fails_for_a_while(bucket, capsys):
    """Records are copied once the bucket works again; a warning names those never copied."""
    folder, away = bucket / "runs", bucket / "away"
    folder.mkdir()
    writer = metrics.MetricsWriter(epath.Path("gs://runs/one"), resume_step=0)
    writer.write(1, tokens=10, loss=2.0)
    folder.rename(away)
    folder.write_text("no folder")  # every write into it fails
    writer.flush()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and warning.startswith(
        "WARNING: records were not copied to gs://runs"
    )
    folder.unlink()
    away.rename(folder)
    writer.write(2, tokens=20, loss=1.0)
    writer.flush()
    records = metrics.read_records(epath.Path("gs://runs/one") / metrics.METRICS)
    assert [r["step"] for r in records] == [1, 2] and not capsys.readouterr().err
    writer.write(3, tokens=30, loss=0.5)
    folder.rename(away)
    folder.write_text("no folder")
    writer.close()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "WERE NOT COPIED to gs://runs/one" in warning
    assert str(writer.folder) in warning
    assert [r["step"] for r in metrics.read_records(writer.folder / metrics.METRICS)] == [1, 2, 3]


def test_the_clock(monkeypatch):
    """Steps of 1, 2, 3, 4 s after the first; a pause of 100 s counts for none of them."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    gib = 2**30

    def device(peak):
        return types.SimpleNamespace(
            device_kind="TPU v5p", platform="tpu", memory_stats=lambda: dict(peak_bytes_in_use=peak)
        )

    clock = metrics.Clock(
        tokens_per_step=1000,
        flops_per_token=459e12,
        num_devices=8,
        local_devices=[device(gib), device(3 * gib)],
    )

    def step(seconds):
        now[0] += seconds
        clock.tick()

    step(50.0)
    assert clock.lap() == {} and clock.tokens_per_second == 0
    step(1.0)
    step(2.0)
    with clock.paused():
        now[0] += 100.0
    step(3.0)
    step(4.0)
    record = clock.lap()
    assert record["tokens_per_second"] == 4 * 1000 / 10.0 == clock.tokens_per_second
    assert record["tokens_per_second_per_device"] == 50.0
    assert (record["step_seconds_p50"], record["step_seconds_max"]) == (2.5, 4.0)
    assert record["step_seconds_p90"] == pytest.approx(3.7)
    assert record["mfu"] == pytest.approx(1000 / 2.5 / 8)
    assert record["hbm_peak_bytes"] == 3 * gib
    step(8.0)
    record = clock.lap()
    assert record["step_seconds_p50"] == record["step_seconds_max"] == 8.0
    assert record["tokens_per_second"] == pytest.approx(5 * 1000 / 18.0)
    assert record["mfu"] == pytest.approx(1000 / 8.0 / 8)
