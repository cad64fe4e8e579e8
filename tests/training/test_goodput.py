"""Goodput: what a run's wall time was spent on, with a clock that only its parts advance."""

import types

from etils import epath
import pytest

from kvjax.data import loader
from kvjax.training import goodput
from kvjax.workdir import checkpoint, metrics
from tests.training.script import Script
from tests.training.test_script import script  # noqa: F401

COMPILE, STEP, BATCH, VALIDATE, SAVE, BEFORE = 8.0, 1.0, 0.5, 2.0, 4.0, 3.0


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(goodput, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def takes(owner, name, seconds):
        real = getattr(owner, name)

        def slow(*args, **keys):
            now[0] += seconds
            return real(*args, **keys)

        monkeypatch.setattr(owner, name, slow)

    takes(Script, "lowered_step", COMPILE)
    takes(Script, "train", STEP)
    takes(Script, "eval_step", VALIDATE)
    takes(checkpoint.Checkpoints, "save", SAVE)
    real = loader.train_batches

    def batches(*args, **keys):
        for rows in real(*args, **keys):
            now[0] += BATCH
            yield rows

    monkeypatch.setattr(loader, "train_batches", batches)
    return now


def test_shares_of_a_run(script, clock, tmp_path, capsys):  # noqa: F811
    """13 steps, 3 validations of 2 batches, 4 checkpoints and 2 snapshots."""
    script.run(options={"goodput": goodput.Goodput(BEFORE)})
    spent = dict(startup=BEFORE, compiling=COMPILE, data=13 * BATCH, profiling=0.0)
    spent |= dict(validating=6 * VALIDATE, saving=6 * SAVE)
    total = 13 * STEP + sum(spent.values())
    timing = metrics.read_records(epath.Path(tmp_path / "run" / metrics.TIMING))
    timing = [record for record in timing if "goodput" in record]
    assert [record.pop("step") for record in timing] == [4, 8, 12, 13]
    assert all(sum(record.values()) == pytest.approx(1) for record in timing)
    expected = {f"lost_{cause}": seconds / total for cause, seconds in spent.items()}
    assert timing[-1] == pytest.approx(expected | dict(goodput=13 * STEP / total))
    assert (
        "\ngoodput: 19.5 % of 66.5 s in steps; saving 36.1 %, validating 18.0 %, compiling 12.0 %, "
        "waiting for data 9.8 %, startup 4.5 %\n"
    ) in capsys.readouterr().out


def test_waits_for_data_count_only_if_devices_are_idle(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(goodput, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def batches():
        while True:
            now[0] += 1.0
            yield now[0]

    stream, book = batches(), goodput.Goodput()
    for ready in (True, False, False, False):
        book.next(stream, {"loss": types.SimpleNamespace(is_ready=lambda ready=ready: ready)})
    assert (book.record()["lost_data"], book.record()["goodput"]) == (0.25, 0.75)
    assert book.next(stream, None) == 5.0 and book.record()["lost_data"] == 0.4
