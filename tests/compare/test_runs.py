"""Runs as read from workdirs: evaluations, times, damage, comparability."""

import json
import pathlib
import types

import numpy as np
import pytest

from kvjax import config as config_lib
from kvjax.compare import runs as runs_lib
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import UserError
from tests.compare.written import grouped, read, write_run


def test_a_run_has_its_evaluations(tmp_path):
    steps = (0, 25, 50, 75, 100)
    write_run(tmp_path / "a", steps=steps, bpb=(5, 4, 3, 2.5, 2.25), rate=4096.0)
    ((run,), left_out) = read(tmp_path / "a")
    assert not left_out and run.finished
    assert run.name == str(tmp_path / "a")
    tokens_per_step = 32 * 256
    assert run.tokens.tolist() == [tokens_per_step * step for step in steps]
    np.testing.assert_allclose(run.seconds, run.tokens / 4096)
    assert run.final == 2.25 and run.seed == 0


def test_seconds_of_a_resumed_run_add_up(tmp_path):
    """Counts repeated steps once: a process of 60 steps was resumed from its step 50."""
    write_run(tmp_path / "a", steps=(50, 100), bpb=(3, 2))
    first = dict(seconds_to_first_step=9.0)
    lines = [dict(step=1) | first, dict(step=50, tokens_per_second=4096.0)]
    lines += [dict(step=60, tokens_per_second=5000.0), dict(step=51) | first]
    lines += [dict(step=100, tokens_per_second=8192.0)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a" / "timing.jsonl").write_text(text)
    ((run,), _) = read(tmp_path / "a")
    np.testing.assert_allclose(run.seconds, [100.0, 150.0])
    (tmp_path / "a" / "timing.jsonl").unlink()
    ((run,), _) = read(tmp_path / "a")
    assert np.isnan(run.seconds).all()


def test_rates_are_means_since_the_first_step_of_a_process(tmp_path):
    """Steps take half a second up to 50, and a second from there."""
    write_run(tmp_path / "a", steps=(50, 100), bpb=(3, 2))
    tokens_per_step = 32 * 256
    seconds = {50: 49 * 0.5, 100: 49 * 0.5 + 50 * 1.0}  # since the end of the first step
    lines = [dict(step=1, seconds_to_first_step=9.0)]
    lines += [
        dict(step=s, tokens_per_second=(s - 1) * tokens_per_step / t) for s, t in seconds.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a" / "timing.jsonl").write_text(text)
    ((run,), _) = read(tmp_path / "a")
    np.testing.assert_allclose(run.seconds, [25.0, 75.0], rtol=0.01)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 0, "seconds_to_first_step": 3.0}',
        f'{{"step": 1{"0" * 400}, "tokens_per_second": 5.0}}',
        f'{{"step": 90, "tokens_per_second": 1{"0" * 400}}}',
        '{"step": 90, "tokens_per_second": -5.0}',
    ],
)
def test_impossible_times_are_ignored(tmp_path, line):
    file = write_run(tmp_path / "a") / "timing.jsonl"
    ((plain,), _) = read(tmp_path / "a")
    file.write_text(line + "\n" + file.read_text())
    ((run,), _) = read(tmp_path / "a")
    np.testing.assert_allclose(run.seconds, plain.seconds)


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_damaged_lines_are_named_and_skipped(tmp_path, capfd, name):
    file = write_run(tmp_path / "a") / name
    ((plain,), _) = read(tmp_path / "a")
    first, *others = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, "{garbage\n", *others]))
    ((run,), _) = read(tmp_path / "a")
    assert run.steps.tolist() == [25, 50, 75, 100]
    assert run.seconds.tolist() == plain.seconds.tolist()
    warning = " ".join(capfd.readouterr().err.split())
    assert f"a/{name}: line 2 is no record: b'{{garbage'" in warning


def test_unusable_runs_are_skipped(tmp_path):
    good = write_run(tmp_path / "good")
    write_run(tmp_path / "unfinished", steps=(25,), bpb=(4,))
    write_run(tmp_path / "empty", steps=(), bpb=())
    write_run(tmp_path / "infinite", bpb=(4, 3, float("nan"), 2))
    write_run(tmp_path / "negative", steps=(-1, 100), bpb=(4, 3))
    write_run(tmp_path / "huge", steps=(100, 2**53 + 1), bpb=(4, 3))
    (write_run(tmp_path / "damaged") / "config.json").write_text("{")
    (tmp_path / "begun").mkdir()
    reasons = {
        "unfinished": ("is unfinished, evaluated up to step 25 of 100", True),
        "empty": ("was never evaluated", True),
        "infinite": ("has bits per byte that are not finite, at step 75", False),
        "negative": ("has a record of step -1, which is out of range", False),
        "huge": (f"has a record of step {2**53 + 1}, which is out of range", False),
        "begun": ("has no config.json: no run has started there", True),
    }
    runs, skipped = read(good, tmp_path / "damaged", *(tmp_path / name for name in reasons))
    assert [run.name for run in runs] == [str(good)]
    damaged, *others = skipped
    assert "is not JSON" in damaged.why and not damaged.may_come
    assert {
        pathlib.Path(run_skipped.name).name: (run_skipped.why, run_skipped.may_come)
        for run_skipped in others
    } == reasons


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(data="other"), "its data set is another"),
        (dict(tokenizer="other"), "its tokenizer is another"),
        (dict(eval_rows=5), "its config.train.eval_rows is 5, not all"),
        (dict(length=128), "its config.data.sequence_length is 128, not 256"),
    ],
)
def test_runs_of_other_data_are_not_compared(tmp_path, change, reason):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, **change)
    runs, _ = read(tmp_path)
    with pytest.raises(UserError, match=f"b cannot be compared with .*a: {reason}"):
        runs_lib.check_comparable(runs)


@pytest.mark.parametrize("file", ["dataset.json", "tokenizer.json"])
def test_runs_of_unknown_data_are_not_compared(tmp_path, file):
    for seed, name in enumerate("ab"):
        (write_run(tmp_path / name, seed=seed) / file).unlink()
    runs, _ = read(tmp_path)
    with pytest.raises(UserError, match=f"a cannot be compared: {file} is missing"):
        runs_lib.check_comparable(runs)
    runs_lib.check_comparable(runs[:1])


def test_workdirs_of_a_folder(tmp_path):
    """Reads a folder's own workdirs and reports deeper ones; without own ones reads deeper ones."""
    write_run(tmp_path / "runs" / "sweeps" / "b", seed=1)
    write_run(tmp_path / "runs" / "sweeps" / "wide" / "c", seed=2)
    write_run(tmp_path / "runs" / "tall" / "d", seed=3)
    runs, left_out = read(tmp_path / "runs")
    assert [pathlib.Path(run.name).name for run in runs] == ["b", "d"]
    assert [(pathlib.Path(x.name).name, x.why[:22]) for x in left_out] == [
        ("wide", "contains runs: name it")
    ]
    write_run(tmp_path / "runs" / "a")
    runs, left_out = read(tmp_path / "runs")
    assert [run.seed for run in runs] == [0]
    assert [pathlib.Path(one.name).name for one in left_out] == ["sweeps", "tall"]
    assert not any(one.may_come for one in left_out)
    for name in ("three/deeper/is/found", "four/deeper/is/not/found"):
        write_run(tmp_path / name)
    (run,), (one,) = read(tmp_path / "three", tmp_path / "four")
    assert run.name.endswith("three/deeper/is/found") and one.name.endswith("four")


def test_prepared_rows_are_identified_by_content(tmp_path):
    for seed in range(2):
        file = write_run(tmp_path / f"s{seed}", seed=seed) / "config.json"
        tree = json.loads(file.read_text())
        tree["data"]["source"] = f"prepared:/disk{seed}/rows"
        file.write_text(json.dumps(tree))
    (group,) = grouped(tmp_path)
    assert list(group.runs) == [0, 1]


def test_a_run_without_num_steps_is_finished_at_its_last_checkpoint(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(runs_lib.storage, "steps", lambda path: folders.append(path) or [25, 50])
    for planned, last, ended in ((0, 50, True), (0, 60, False), (60, 60, True), (60, 50, False)):
        train = types.SimpleNamespace(num_steps=planned)
        run_of = types.SimpleNamespace(train=train)
        assert runs_lib._is_finished(tmp_path, run_of, last) == ended
    assert folders == [tmp_path / "checkpoints"] * 2


def test_training_flops_and_6n():
    """FLOPs from shapes, and 6N: 6 x 2.444B x 50B tokens are LRKV figure 4's 733 exaFLOPs."""
    model = config_lib.resolve(command_line.load_config(CONFIGS / "mha_2p5b.py")).model
    costs = runs_lib.costs(model, 2048)
    assert costs["six_n"] * 50e9 / 1e18 == pytest.approx(733.3, abs=0.5)
    assert costs["flops"] > costs["six_n"]
