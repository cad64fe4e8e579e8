"""Trackers get each record once, over any kills, and their failures change nothing else."""

import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import types

from etils import epath
import pytest

from kvjax.foundation import extras
from kvjax.foundation.errors import UserError
from kvjax.workdir import metrics, trackers

CONFIG = "model.num_layers = 2\nname = 'a = b'\ntrain.betas = (0.9, 0.95)\n"


class Kept:
    """A tracker that keeps its records, and may fail at a step or on closing."""

    def __init__(self, events=None, *, fails=None):
        self.kept, self.fails, self.closed = [] if events is None else events, fails, 0

    def write(self, step, record):
        if step == self.fails:
            raise RuntimeError("no connection\nwith details")
        self.kept += [(step, name, value) for name, value in record.items()]

    def close(self):
        self.closed += 1
        if self.fails == "close":
            raise SystemError


def stream(last=12):
    """The records of a run, in order: file, step and values."""
    for step in range(1, last + 1):
        yield "write", step, dict(loss=1 / step, tokens=step)
        yield "write_timing", step, dict(speed=2.0 * step)
        if step % 3 == 0:
            yield "write", step, dict(validation=-1.0 * step)


EXPECTED = [(step, *pair) for _, step, values in stream() for pair in values.items()]


def process(workdir, resume_step, tracker_list, stop=None):
    """Writes the records after a checkpoint, at most `stop`; returns the last whole step."""
    writer = metrics.MetricsWriter(workdir, resume_step=resume_step, trackers=tracker_list)
    last = resume_step
    remaining = [record for record in stream() if record[1] > resume_step]
    for file, step, values in remaining[:stop]:
        getattr(writer, file)(step, **values)
        last = step - 1  # a checkpoint follows all records of its step
    if stop is None:
        writer.close()
    return last


def test_each_record_once_over_kills(tmp_path):
    process(epath.Path(tmp_path), 0, [])
    whole = (tmp_path / metrics.METRICS).read_bytes()
    for seed in range(20):
        rng, events, step = random.Random(seed), [], 0
        workdir = epath.Path(tmp_path) / str(seed)
        workdir.mkdir()
        for _ in range(rng.randint(1, 4)):
            checkpoint = step // 4 * 4
            step = max(
                process(workdir, checkpoint, [Kept(events), Kept()], rng.randint(0, 12)), step
            )
        process(workdir, step // 4 * 4, [Kept(events)])
        assert events == EXPECTED, seed
        assert (workdir / metrics.METRICS).read_bytes() == whole


def test_a_tracker_that_fails_is_dropped_with_a_warning(tmp_path, capsys, monkeypatch):
    (tmp_path / "events").write_text("no folder")
    good, bad, late = Kept(), Kept(fails=3), Kept(fails="close")
    process(epath.Path(tmp_path), 0, ["tensorboard", bad, late, good])
    assert good.kept == late.kept == EXPECTED and bad.kept == [e for e in EXPECTED if e[0] < 3]
    assert (good.closed, bad.closed, late.closed) == (1, 0, 1)
    warnings = capsys.readouterr().err.splitlines()
    goes_on = "and gets no more records; the run goes on"
    assert [line.split(" (")[0] for line in warnings] == [
        f"WARNING: the tracker tensorboard failed at its start {goes_on}",
        f"WARNING: the tracker Kept failed at step 3 {goes_on}",
        f"WARNING: the tracker Kept+ failed at its end {goes_on}",
    ]
    assert warnings[1].endswith("(RuntimeError: no connection)") and len(warnings) == 3
    (tmp_path / trackers.STATE).write_text("{")
    process(epath.Path(tmp_path), 12, [Kept()])
    assert capsys.readouterr().err.startswith(f"WARNING: {tmp_path / trackers.STATE}: ")


def events_of(folder):
    """The (step, tag, value) that TensorBoard shows, by its format's definition."""
    from tensorboardX.proto import event_pb2

    shown = []
    for file in sorted(folder.glob("events*"), key=lambda path: path.stat().st_mtime_ns):
        content, offset = file.read_bytes(), 0
        while offset < len(content):
            (size,) = struct.unpack_from("<Q", content, offset)
            event = event_pb2.Event.FromString(content[offset + 12 : offset + 12 + size])
            offset += size + 16
            if event.HasField("session_log"):
                shown = [event_shown for event_shown in shown if event_shown[0] < event.step]
            shown += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return shown


def test_tensorboard_shows_each_record_once_and_at_once(tmp_path, monkeypatch):
    workdir = epath.Path(tmp_path)
    monkeypatch.setattr(metrics.time, "time", iter(range(10**6)).__next__)  # a file per second
    process(workdir, 0, ["tensorboard"], 14)
    assert [event[:2] for event in events_of(tmp_path / "events")] == [e[:2] for e in EXPECTED[:20]]
    process(workdir, 4, ["tensorboard"])
    shown = events_of(tmp_path / "events")
    assert [event[:2] for event in shown] == [e[:2] for e in EXPECTED]
    assert [e[2] for e in shown] == pytest.approx([e[2] for e in EXPECTED])


def test_weights_and_biases_goes_on_under_its_id(tmp_path, monkeypatch):
    runs, logged = [], []

    def init(**options):
        runs.append(options)
        log = types.SimpleNamespace(finish=lambda: logged.append("finish"))
        log.log = lambda record, step: logged.extend((step, *pair) for pair in record.items())
        return log

    mode = types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))
    fake = types.SimpleNamespace(init=init, setup=lambda: mode, Settings=dict, run=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("PROJECT", "NAME", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    workdir = epath.Path(tmp_path / "mine")
    workdir.mkdir()
    (workdir / "config.txt").write_text(CONFIG)
    process(workdir, 0, ["wandb"], 14)
    process(workdir, 4, ["wandb"])
    # The step that a kill interrupts comes again, since it was not sent.
    interrupted = [event for event in EXPECTED if event[0] == 6]
    sent = [event for event in EXPECTED if event[0] <= 6]
    assert logged == [*sent, *interrupted, *EXPECTED[len(sent) :], "finish"]
    process(workdir, 12, ["wandb"])
    assert logged[-2:] == ["finish", "finish"]
    assert runs[0] == runs[1]
    assert runs[0]["config"] == {"model.num_layers": 2, "name": "a = b"} | {
        "train.betas": (0.9, 0.95)
    }
    assert (runs[0]["project"], runs[0]["name"], runs[0]["resume"]) == ("kvjax", "mine", "allow")
    for known, mode.settings.mode, error in (
        (False, "online", "no account here: run `wandb login` .* WANDB_MODE=offline"),
        (False, "offline", ""),
        (True, "online", ""),
    ):
        fake.login = lambda prompt, known=known: known
        monkeypatch.setattr(extras, "require", lambda *_: None)
        if error:
            with pytest.raises(UserError, match=error):
                trackers.check(["wandb"])
        else:
            trackers.check(["wandb"])


def history_of(file: pathlib.Path):
    """The (step, name, value) in a .wandb file: records of LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, offset, fragment = file.read_bytes(), 7, b""
    while offset + 7 <= len(content):
        if 32768 - offset % 32768 < 7:  # the rest of a block
            offset += 32768 - offset % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, offset)
        fragment += content[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, fragment = wandb_internal_pb2.Record.FromString(fragment), b""
            items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
            step = record.history.step.num
            yield from ((step, k, json.loads(v)) for k, v in items.items() if k[0] != "_")


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra `wandb`")
    settings = dict(MODE="offline", SILENT="true", ERROR_REPORTING="false")
    settings["X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.1"  # 15 s
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    workdir = epath.Path(tmp_path / "mine")
    workdir.mkdir()
    (workdir / "config.txt").write_text(CONFIG)
    code = f"""if True:
        import os, signal, sys, time
        from etils import epath
        from kvjax.workdir import trackers
        from tests.workdir.test_trackers import process
        trackers.check(["wandb"])
        resume_step, stop = map(int, sys.argv[1:])
        process(epath.Path({str(workdir)!r}), resume_step, ["wandb"], stop or None)
        if stop:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)"""
    for arguments, status in ((("0", "14"), -signal.SIGKILL), (("4", "0"), 0)):
        run = subprocess.run([sys.executable, "-c", code, *arguments], check=False)
        assert run.returncode == status
    files = sorted(
        (tmp_path / "mine" / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime
    )
    assert len(files) == 2 and len({file.name for file in files}) == 1
    events = [event for file in files for event in history_of(file)]
    assert sorted(events) == sorted(EXPECTED)


@pytest.mark.parametrize(
    "value, message",
    [
        ("wandb,mlflow", r"--trackers = 'mlflow': must be one of 'tensorboard', 'wandb', 'none'"),
        ("", "--trackers = '': must be one of"),
        ("none,tensorboard", "none excludes other"),
        (["mlflow"], r"trackers = 'mlflow': must be one of 'tensorboard', 'wandb'"),
        ([Kept], r"trackers: <class .*Kept'> must be one of .* write\(step, record\)"),
        ([print], "object with write"),
        ("tensorboard", r"trackers = 'tensorboard': must be a list, as \['tensorboard'\]"),
    ],
)
def test_what_is_no_tracker(monkeypatch, value, message):
    monkeypatch.setattr(extras, "require", lambda *_: None)
    check = trackers.parse if isinstance(value, str) and "must be a list" not in message else None
    with pytest.raises(UserError, match=message):
        (check or trackers.check)(value)
    assert trackers.parse("tensorboard, wandb,wandb") == ("tensorboard", "wandb")
    trackers.check(["tensorboard", Kept()])
