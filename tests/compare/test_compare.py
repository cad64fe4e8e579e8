"""Comparisons of runs: comparability, means over seeds, token savings."""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from scipy import stats

from kvjax import config as config_lib
from kvjax.analysis.page import document, draw
from kvjax.compare import (
    __main__ as command,
    groups as groups_lib,
    report,
    runs as runs_lib,
    savings as savings_lib,
)
from kvjax.foundation import command_line, json_text, provenance
from kvjax.foundation.checkout import CONFIGS, ROOT
from kvjax.foundation.errors import UserError
from tests import golden
from tests.compare.command import run
from tests.compare.written import write_run

STEPS = (25, 50, 75, 100)


def read(*folders: pathlib.Path, running: bool = False):
    places = runs_lib.workdirs([str(folder) for folder in folders])
    return runs_lib.read(places, running=running)


def grouped(*folders: pathlib.Path, way: str = "seed", running: bool = False):
    runs, left_out = read(*folders, running=running)
    assert not left_out
    return groups_lib.groups(runs, way)


def test_a_run_is_what_its_workdir_says(tmp_path):
    steps = (0, *STEPS)
    write_run(tmp_path / "a", steps=steps, bpb=(5, 4, 3, 2.5, 2.25), rate=4096.0)
    ((run,), left_out) = read(tmp_path / "a")
    assert not left_out and run.finished
    assert run.name == str(tmp_path / "a")
    each = 32 * 256
    assert run.tokens.tolist() == [each * step for step in steps]
    np.testing.assert_allclose(run.seconds, run.tokens / 4096)
    assert run.final == 2.25 and run.seed == 0


def test_seconds_of_a_resumed_run_add_up(tmp_path):
    """Steps 1 to 50 at 4,096 tokens/s, then, in another process, 51 to 100 at 8,192.

    The first had gone on to 60 when it was killed, and its last checkpoint was of 50.
    """
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


def test_rates_are_since_the_first_step_of_a_process(tmp_path):
    """Half a second a step up to 50, a second a step from there: the last record's rate is both."""
    write_run(tmp_path / "a", steps=(50, 100), bpb=(3, 2))
    each = 32 * 256
    seconds = {50: 49 * 0.5, 100: 49 * 0.5 + 50 * 1.0}  # since the end of the first step
    lines = [dict(step=1, seconds_to_first_step=9.0)]
    lines += [dict(step=s, tokens_per_second=(s - 1) * each / t) for s, t in seconds.items()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a" / "timing.jsonl").write_text(text)
    ((run,), _) = read(tmp_path / "a")
    np.testing.assert_allclose(run.seconds, [25.0, 75.0], rtol=0.01)  # the first at its mean


def test_seeds_of_a_config_are_one_curve_with_a_band(tmp_path):
    curves = [(4.0, 3.0, 2.5, 2.2), (4.2, 3.1, 2.4, 2.3), (4.1, 2.9, 2.6, 2.1)]
    for seed, bpb in enumerate(curves):
        write_run(tmp_path / f"s{seed}", seed=seed, bpb=bpb)
    (group,) = grouped(tmp_path)
    assert list(group.runs) == [0, 1, 2] and group.name == "lrkv_tiny"
    np.testing.assert_allclose(group.curve.bpb, np.mean(curves, axis=0))
    half = stats.sem(curves, axis=0) * stats.t.ppf(0.975, 2)
    np.testing.assert_allclose(group.curve.half, half)
    assert group.final.half == pytest.approx(half[-1])


def test_a_band_is_over_steps_that_all_seeds_have(tmp_path):
    write_run(tmp_path / "a", steps=(25, 50, 100), bpb=(4, 3, 2), seed=0)
    write_run(tmp_path / "b", steps=(50, 75, 100), bpb=(3.5, 2.7, 2.5), seed=1)
    (group,) = grouped(tmp_path)
    assert group.curve.steps.tolist() == [50, 100]
    np.testing.assert_allclose(group.curve.bpb, [3.25, 2.25])


def test_what_is_not_computed_otherwise_does_not_part_runs(tmp_path):
    """A run's name, a key that is newer than the run, and when a run is looked at."""
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, log_every=3, eval_every=17)
    tree = json.loads((tmp_path / "b" / "config.json").read_text())
    tree["name"] = "sweeps/b"
    del tree["model"]["norm_gain"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(tree))
    (group,) = grouped(tmp_path)
    assert list(group.runs) == [0, 1]


def test_configs_of_one_name_are_told_apart_by_their_keys(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", num_steps=200, steps=(100, 200), bpb=(3, 2))
    write_run(tmp_path / "c", config="mha_tiny")
    names = [group.name for group in grouped(tmp_path)]
    assert names == ["lrkv_tiny num_steps=100", "lrkv_tiny num_steps=200", "mha_tiny"]


def test_without_groups_each_run_is_a_curve(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"s{seed}", seed=seed)
    names = [group.name for group in grouped(tmp_path, way="none")]
    assert names == [f"{tmp_path}/s0", f"{tmp_path}/s1"]


def test_one_run_given_twice_is_refused(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    with pytest.raises(UserError, match=r"b has the config and the seed \(0\) of .*a: give one"):
        grouped(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(data="other"), "its data set is another"),
        (dict(tokenizer="other"), "its tokenizer is another"),
        (dict(eval_rows=5), "its config.train.eval_rows is 5, not all"),
        (dict(length=128), "its config.data.sequence_length is 128, not 256"),
    ],
)
def test_runs_of_other_things_are_not_compared(tmp_path, change, said):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, **change)
    runs, _ = read(tmp_path)
    with pytest.raises(UserError, match=f"b cannot be compared with .*a: {said}"):
        runs_lib.check_comparable(runs)


@pytest.mark.parametrize("file", ["dataset.json", "tokenizer.json"])
def test_what_tells_nothing_of_its_data_is_compared_with_nothing(tmp_path, file):
    for seed, name in enumerate("ab"):
        (write_run(tmp_path / name, seed=seed) / file).unlink()
    runs, _ = read(tmp_path)
    with pytest.raises(UserError, match=f"a cannot be compared: {file} is missing"):
        runs_lib.check_comparable(runs)
    runs_lib.check_comparable(runs[:1])


def test_what_has_nothing_to_compare_is_left_out_by_name(tmp_path):
    good = write_run(tmp_path / "good")
    write_run(tmp_path / "unfinished", steps=(25,), bpb=(4,))
    write_run(tmp_path / "empty", steps=(), bpb=())
    write_run(tmp_path / "infinite", bpb=(4, 3, float("nan"), 2))
    (write_run(tmp_path / "damaged") / "config.json").write_text("{")
    (tmp_path / "begun").mkdir()
    folders = [tmp_path / name for name in ("unfinished", "empty", "infinite", "damaged", "begun")]
    runs, left_out = read(good, *folders)
    assert [run.name for run in runs] == [str(good)]
    said = {pathlib.Path(one.name).name: (one.why, one.may_come) for one in left_out}
    why, may_come = said.pop("damaged")
    assert "is not JSON" in why and not may_come
    assert said == {
        "unfinished": ("is unfinished, evaluated up to step 25 of 100", True),
        "empty": ("was never evaluated", True),
        "infinite": ("has bits per byte that are not finite, at step 75", False),
        "begun": ("has no config.json: no run has started there", True),
    }


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (f'{{"step": {2**53 + 1}, "validation_bpb": 1.0}}', f"a record of step {2**53 + 1}"),
        ('{"step": -1, "validation_bpb": 1.0}', "a record of step -1, which is out of range"),
    ],
)
def test_a_figure_that_none_can_be_is_left_out_by_name(tmp_path, record, said):
    write_run(tmp_path / "good")
    with (write_run(tmp_path / "odd") / "metrics.jsonl").open("a") as more:
        more.write(record + "\n")
    (run,), (odd,) = read(tmp_path)
    assert run.name.endswith("good") and odd.name.endswith("odd") and said in odd.why


@pytest.mark.parametrize(
    "odd",
    [
        '{"step": 0, "seconds_to_first_step": 3.0}',
        f'{{"step": 1{"0" * 400}, "tokens_per_second": 5.0}}',
        f'{{"step": 90, "tokens_per_second": 1{"0" * 400}}}',
    ],
)
def test_odd_times_change_no_others(tmp_path, odd):
    file = write_run(tmp_path / "a") / "timing.jsonl"
    ((plain,), _) = read(tmp_path / "a")
    file.write_text(odd + "\n" + file.read_text())
    ((run,), _) = read(tmp_path / "a")
    np.testing.assert_allclose(run.seconds, plain.seconds)


def test_runs_lie_in_folders_of_folders(tmp_path):
    """Only a folder's own workdirs are compared; deeper ones are reported."""
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


def test_prepared_rows_that_moved_are_the_same(tmp_path):
    for seed in range(2):
        file = write_run(tmp_path / f"s{seed}", seed=seed) / "config.json"
        tree = json.loads(file.read_text())
        tree["data"]["source"] = f"prepared:/disk{seed}/rows"
        file.write_text(json.dumps(tree))
    (group,) = grouped(tmp_path)
    assert list(group.runs) == [0, 1]


def test_a_damaged_line_is_told_by_file_and_number(tmp_path, capfd):
    file = write_run(tmp_path / "a") / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], "{garbage\n", *lines[1:]]))
    ((run,), _) = read(tmp_path / "a")
    assert run.steps.tolist() == list(STEPS)
    said = " ".join(capfd.readouterr().err.split())
    assert "a/metrics.jsonl: line 2 is no record: b'{garbage'" in said


def test_damaged_rates_are_told_and_do_not_count(tmp_path, capfd):
    file = write_run(tmp_path / "a") / "timing.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    ((plain,), _) = read(tmp_path / "a")
    with file.open("a") as more:
        more.write('{garbage\n{"step": 90, "tokens_per_second": -5.0}\n')
    ((run,), _) = read(tmp_path / "a")
    assert run.seconds.tolist() == plain.seconds.tolist()
    said = " ".join(capfd.readouterr().err.split())
    assert "a/timing.jsonl: line 3 is no record: b'{garbage'" in said


def test_a_running_one_is_taken_as_far_as_it_is(tmp_path):
    write_run(tmp_path / "a", steps=(25, 50), bpb=(4, 3))
    (group,) = grouped(tmp_path / "a", running=True)
    assert not group.finished and group.final is None
    assert group.curve.bpb.tolist() == [4, 3]
    assert savings_lib.savings([group], group) == [] and report._cache_points([group]) == {}


def test_a_run_once_over_its_rows_has_ended_with_its_last_checkpoint(tmp_path, monkeypatch):
    """Its config has no number of steps."""
    asked = []
    monkeypatch.setattr(runs_lib.storage, "steps", lambda path: asked.append(path) or [25, 50])
    for planned, last, ended in ((0, 50, True), (0, 60, False), (60, 60, True), (60, 50, False)):
        train = types.SimpleNamespace(num_steps=planned)
        run_of = types.SimpleNamespace(train=train)
        assert runs_lib._is_finished(tmp_path, run_of, last) == ended
    assert asked == [tmp_path / "checkpoints"] * 2


def test_figures_are_of_what_has_ended(tmp_path):
    """One seed of each still runs: lengths, differences and savings are those of the other."""
    for config, bpb in (("lrkv_tiny", (4, 2.5, 2.4, 2.2)), ("mha_tiny", (4, 3.5, 3, 2.5))):
        write_run(tmp_path / config / "s0", config=config, bpb=bpb)
        half = dict(seed=1, steps=(25, 50), bpb=bpb[:2])
        write_run(tmp_path / config / "s1", config=config, **half)
    lrkv, mha = grouped(tmp_path, running=True)
    far = dict(seed=1, steps=(25, 50, 75), bpb=(2.4, 2.3, 2.2))  # a seed that still runs counts not
    write_run(tmp_path / "mha_tiny" / "s1", seed=1, config="mha_tiny", bpb=(4, 3.5, 3, 2.5))
    write_run(tmp_path / "lrkv_tiny" / "s1", **far)
    ahead, behind = grouped(tmp_path, running=True)
    (saved,) = savings_lib.savings([ahead, behind], behind)
    assert saved.within_a_run.mean == pytest.approx(0.5) and saved.within_a_run.half is None
    assert lrkv.tokens == mha.tokens == 100 * 32 * 256
    (saved,) = savings_lib.savings([lrkv, mha], mha)
    assert saved.leader == "lrkv_tiny" and saved.within_a_run.mean == pytest.approx(0.5)
    (row, _) = report.rows([lrkv, mha], mha)
    assert row["against"] == pytest.approx(-0.3)
    assert row["seconds"] == pytest.approx(100 * 32 * 256 / 8192.0)


def test_other_lengths_are_not_alike_on_their_way(tmp_path):
    write_run(tmp_path / "short", config="mha_tiny")
    how = dict(num_steps=200, steps=(100, 200), bpb=(2, 1))
    write_run(tmp_path / "long" / "s0", **how)
    write_run(tmp_path / "long" / "s1", seed=1, num_steps=200, steps=(100,), bpb=(2,))
    groups = grouped(tmp_path / "short", tmp_path / "long", running=True)
    assert report.rows(groups, groups[0])[1]["against"] is None
    assert savings_lib.savings(groups, groups[0]) == []


def test_figure_3_is_where_a_curve_passes_the_others_end(tmp_path):
    """From 3.0 at 50 steps to 2.5 at 75: 2.6 is passed at 70, 30 % before the end."""
    write_run(tmp_path / "a", bpb=(4, 3, 2.5, 2.25))
    write_run(tmp_path / "b", config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    ours, theirs = grouped(tmp_path)
    (saving,) = savings_lib.savings([ours, theirs], theirs)
    assert (saving.leader, saving.behind) == ("lrkv_tiny", "mha_tiny")
    assert saving.within_a_run.mean == pytest.approx(0.30)
    assert saving.at_equal_horizon is None
    (other,) = savings_lib.savings([ours, theirs], ours)
    assert other == saving  # whoever is the reference


def test_the_equal_horizon_takes_runs_that_have_ended(tmp_path):
    """Ended after 50 steps at 2.8 and after 100 at 2.4: 2.6 takes 50·√2."""
    write_run(tmp_path / "short", num_steps=50, steps=(25, 50), bpb=(4, 2.8))
    write_run(tmp_path / "whole", bpb=(4, 3, 2.5, 2.4))
    write_run(tmp_path / "other", config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    found = grouped(tmp_path)
    reference = next(group for group in found if group.name == "mha_tiny")
    (saving,) = savings_lib.savings(found, reference)
    assert saving.within_a_run.mean == pytest.approx(0.30)
    assert saving.at_equal_horizon.mean == pytest.approx(1 - 50 * np.sqrt(2) / 100)
    ended = [(50, 2.8), (100, 2.4), (200, 2.4)]
    for loss, share in ((2.8, 0.5), (2.4, 0.0), (2.81, None), (2.39, None)):
        found = savings_lib._between(ended, loss, 100)
        assert found == (share if share is None else pytest.approx(share))


def test_a_seed_that_never_gets_there_is_not_left_out_of_a_mean(tmp_path):
    for seed, last in enumerate((1.8, 2.05, 2.05)):
        write_run(tmp_path / f"a{seed}", seed=seed, bpb=(4, 3, 2.5, last))
        write_run(tmp_path / f"b{seed}", seed=seed, config="mha_tiny", bpb=(4, 3.5, 3, 2.0))
    ours, theirs = grouped(tmp_path)
    assert savings_lib.within_a_run(ours, theirs) is None
    (tmp_path / "a1").rename(tmp_path / "x")
    write_run(tmp_path / "a1", seed=1, bpb=(4, 3, 2.5, 1.9))
    write_run(tmp_path / "a2", seed=2, bpb=(4, 3, 2.5, 1.9))
    ours, theirs = grouped(*(tmp_path / name for name in ("a0", "a1", "a2", "b0", "b1", "b2")))
    assert savings_lib.within_a_run(ours, theirs).mean > 0


def test_curves_that_lead_from_the_start_save_all_that_is_known(tmp_path):
    write_run(tmp_path / "a", bpb=(2.0, 1.9, 1.8, 1.7))
    write_run(tmp_path / "b", config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    ours, theirs = grouped(tmp_path)
    assert savings_lib.within_a_run(ours, theirs).mean == pytest.approx(0.75)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_draws(two, tmp_path):
    out = tmp_path / "out"
    assert run(two, f"--out={out}", "--against=mha_tiny") == 0
    html = (out / "compare.html").read_text()
    assert html.count('class="curves"') == 5 and 'data-series="1"' in html
    assert 'http-equiv="refresh"' not in html
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_all_that_a_comparison_says(drawn, tmp_path, capfd, monkeypatch):
    """Covers seeds as one curve, a missing seed, two lengths and speeds, scores, and what is not.

    The file of JSON and the page are of what the sections show, and the picture of their figures.
    """
    folder = tmp_path / "runs"
    for seed in range(3):
        bpb = (4, 3 + seed / 50, 2.5, 2.2 + seed / 30)
        write_run(folder / f"a{seed}", seed=seed, bpb=bpb, rate=900.0)
        _evaluated(folder / f"a{seed}", 100, combined=dict(value=0.3 + seed / 40), core=0.2)
        bpb = (4.5, 3.5, 2.9 - seed / 40, 2.4)
        write_run(folder / f"b{seed}", seed=seed, config="mha_tiny", bpb=bpb, rate=2e5)
    _evaluated(folder / "b1", 100, core=0.15)
    write_run(folder / "c", seed=1, config="mqa_tiny", bpb=(5, 4, 3.5, 3.25))
    for seed in range(2):
        how = dict(seed=seed, num_steps=50, steps=(25, 50), bpb=(3.5, 2.5 + seed / 20))
        write_run(folder / f"d{seed}", **how)
    write_run(folder / "z", seed=7, steps=(25,), bpb=(4,))
    monkeypatch.chdir(tmp_path)
    assert run("runs", "--out=out", "--against=mha_tiny", "--json") == 0
    printed, said = capfd.readouterr()
    golden.check_text(re.sub(r"[\d.]+ MB", "some MB", said), "compare/printed", 1e-3)
    ((sections,), (panels,)) = drawn
    for section in sections:
        golden.check(section, "compare", 1e-3)
    assert [draw.live_lines(**panel)[0] for panel in panels] == [
        figure.svg for section in sections for figure in section.figures
    ]

    stored = json.loads((tmp_path / "out" / "compare.json").read_text())
    result = json.loads(printed)
    assert {name: pathlib.Path(result.pop(name)) for name in ("html", "png", "json")} == {
        name: tmp_path / "out" / f"compare.{name}" for name in ("html", "png", "json")
    }
    left_out = dict(name="runs/z", why="is unfinished, evaluated up to step 25 of 100")
    lacking = {"mqa_tiny": [0, 2], "lrkv_tiny num_steps=50": [2]}
    told = dict(left_out=[left_out | dict(may_come=True)], lacking=lacking)
    results, curves = (json_text.plain(section.data) for section in sections[:2])
    assert result == results | told
    made = provenance.software("matplotlib")
    names = [f"runs/{name}" for name in "a0 a1 a2 b0 b1 b2 c d0 d1".split()]
    about = {
        "Runs": ", ".join(names),
        "Data set": hashlib.sha256(b'{"dataset": "data"}').hexdigest()[:16],
        "Command": made["command"],
        "Date": made["date"],
        "Commit": made["commit"],
        "Versions": {"python": made["python"]} | made["packages"],
    }
    savings = stored.pop("savings")
    scores = {f"runs/a{i}": dict(combined=30 + 2.5 * i, core=20) for i in range(3)}
    scores["runs/b1"] = dict(core=15)
    found = stored.pop("scores")
    assert {name: pytest.approx(each) for name, each in scores.items()} == found
    assert stored == results | told | dict(about=about, curves=curves)
    assert savings[1] == dict(
        leader="mha_tiny",
        behind="mqa_tiny",
        tokens=819_200,
        within_a_run=dict(mean=pytest.approx(0.4), half=None),
        at_equal_horizon=None,
    )
    page = document.page("Runs compared", command._LEAD, sections, about)
    assert (tmp_path / "out" / "compare.html").read_text() == page
    assert (tmp_path / "out" / "compare.png").read_bytes() == b"a picture"


def test_a_long_curve_is_drawn_at_as_many_points_as_can_be_seen(tmp_path):
    """Half of them even in steps and half in ratios of steps; in the largest unit there is one of.

    Nothing tells the time of this run, which has no axis of it then.
    """
    count = 1000
    how = dict(num_steps=count, steps=range(1, count + 1), bpb=np.linspace(4, 2, count))
    (write_run(tmp_path / "a", **how) / "timing.jsonl").unlink()
    groups = grouped(tmp_path / "a")
    each = 32 * 256
    kept = {round(x) for x in np.linspace(1, count, 100)}
    kept = sorted(kept | {round(x) for x in np.geomspace(1, count, 100)})
    assert report._axes(groups) == ["tokens", "flops", "six_n"]
    drawn = report._lines(groups, "tokens")
    assert drawn["x"] == "tokens, millions" and drawn["bands"] == {}
    xs, ys = drawn["series"]["lrkv_tiny"]
    np.testing.assert_allclose(xs, each * np.array(kept) / 1e6)
    np.testing.assert_allclose(ys, how["bpb"][np.array(kept) - 1])
    assert report.rows(groups, groups[0])[0]["seconds"] is None
    for largest, units, expected in (
        (1e18, report._FLOPS, (1e18, "exaFLOPs")),
        (9e17, report._FLOPS, (1e15, "petaFLOPs")),
        (1e12, report._FLOPS, (1e12, "teraFLOPs")),
        (1, report._FLOPS, (1e9, "gigaFLOPs")),
        (1e9, report._TOKENS, (1e9, "billions")),
        (1e3, report._TOKENS, (1e3, "thousands")),
        (999, report._TOKENS, (1, "one by one")),
        (86_400, report._SECONDS, (86_400, "days")),
        (3600, report._SECONDS, (3600, "hours")),
    ):
        assert report._unit(largest, units) == expected


def test_compute_is_counted_in_two_ways():
    """FLOPs from shapes, and 6N: 6 x 2.444B x 50B tokens are LRKV figure 4's 733 exaFLOPs."""
    model = config_lib.resolve(command_line.load_config(CONFIGS / "mha_2p5b.py")).model
    found = runs_lib.costs(model, 2048)
    assert found["six_n"] * 50e9 / 1e18 == pytest.approx(733.3, abs=0.5)
    assert found["flops"] > found["six_n"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no workdir is given"),
        (["{runs}/nothing"], "no such folder"),
        (["{runs}/l0", "{runs}/l0"], "is given twice"),
        (["{runs}", "--group=heads"], "'heads' is none of seed, none"),
        (["{runs}", "--against=mla"], "'mla' is none of lrkv_tiny, mha_tiny"),
        (["{runs}", "--watch=-1"], "--watch = -1"),
        (["{runs}/z"], "nothing to compare: .*z is unfinished"),
        (["{runs}/l0", "{runs}/l0/config.json"], "l0/config.json: is a file; give workdirs"),
        (["{runs}", "--scores={runs}/nothing"], "--scores: .*nothing: no such folder"),
        (["{runs}", "--out={runs}/l0/config.json"], "must be a folder"),
        (["ftp://x/y"], "ftp:// is not supported"),
    ],
)
def test_bad_input_is_one_line(two, capfd, arguments, said):
    asked = [argument.format(runs=two) for argument in arguments]
    out = [] if any("--out" in argument for argument in asked) else [f"--out={two.parent}/out"]
    assert run(*asked, *out) == 2
    message = capfd.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    assert re.search(said, message), message


@pytest.mark.slow
def test_a_bucket_is_read_and_written(bucket, capfd):
    write_run(bucket / "x" / "runs" / "a")
    write_run(bucket / "x" / "runs" / "b", config="mha_tiny")
    assert run("gs://x/runs", "--out=gs://x/compared", "--json") == 0
    rows = json.loads(capfd.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["lrkv_tiny", "mha_tiny"]
    written = {path.name for path in (bucket / "x" / "compared").iterdir()}
    assert written == {"compare.html", "compare.png", "compare.json"}


@pytest.mark.slow
def test_no_device_is_asked(two, tmp_path):
    """The run that is watched may hold all of them: here there is none of the kind."""
    command = [sys.executable, "-m", "kvjax.compare", str(two), f"--out={tmp_path / 'out'}"]
    environment = os.environ | dict(JAX_PLATFORMS="tpu")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "compare.html").exists()


def _evaluated(workdir: pathlib.Path, step: int, **scores) -> None:
    folder = workdir / "evaluations" / str(step)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(scores))


def test_ends_stand_against_caches_and_scores(drawn, tmp_path, capfd, monkeypatch):
    """LRKV's figure 5: a run has its own score, or that of the run which started from it."""
    monkeypatch.chdir(tmp_path)
    base, mid, out = map(pathlib.Path, ("base", "mid", "out"))
    bpb_and_score = {
        "mha": (2.2, 0.35),
        "lrkv": (2.1, 0.37),
        "mqa": (2.4, 0.31),
        "gqa": (2.3, 0.34),
    }
    for mechanism, (bpb, score) in bpb_and_score.items():
        run_of = write_run(base / mechanism, config=f"{mechanism}_tiny", bpb=(4, 3, 2.5, bpb))
        _child(mid / mechanism, run_of.resolve())
        _evaluated(mid / mechanism, 300, combined=dict(value=0.1))  # an earlier step
        _evaluated(mid / mechanism, 1000, combined=dict(value=score))
        (mid / mechanism / "evaluations" / "2000").mkdir()  # of which nothing is written yet
    _evaluated(_child(mid / "twice", (base / "mha").resolve()), 700, core=0.5)
    _child(mid / "yet", (base / "mha").resolve())
    _evaluated(write_run(mid / "other"), 100, combined=dict(value=0.9))
    assert run(base, f"--scores={mid}", f"--out={out}", "--json") == 0
    stored = json.loads((out / "compare.json").read_text())
    scores = {pathlib.Path(name).name: found for name, found in stored["scores"].items()}
    assert scores == {name: dict(combined=100 * y) for name, (_, y) in bpb_and_score.items()}
    why = {
        "other": ("is neither a compared run nor started from one", False),
        "twice": ("is a second evaluation of base/mha", False),
        "yet": ("was not evaluated", True),
    }
    assert {x["name"]: (x["why"], x["may_come"]) for x in stored["left_out"]} == {
        f"mid/{name}": said for name, said in why.items()
    }
    caches, score = drawn[0][0][-1].figures
    assert caches.alternative == (
        "gqa_tiny: 2.3 at 1024; lrkv_tiny: 2.1 at 1600; mha_tiny: 2.2 at 2048; mqa_tiny: 2.4 at 512"
    )
    assert score.alternative == (
        "gqa_tiny: 34 at 2.3; lrkv_tiny: 37 at 2.1; mha_tiny: 35 at 2.2; mqa_tiny: 31 at 2.4"
    )
    expected = stats.linregress(*zip(*bpb_and_score.values(), strict=True)).rvalue ** 2
    assert f"R² = {expected:.3f} over 4 points." in score.caption
    for damaged in (
        '{"combined": "a"}',
        '{"combined": {"value": null}}',
        '{"combined": {"value": true}}',
        '{"core": [1]}',
        "{",
    ):
        (mid / "mha" / "evaluations" / "1000" / "summary.json").write_text(damaged)
        capfd.readouterr()
        assert run(base, "--scores=mid/mha", f"--out={out}") == 0  # curves are compared
        said = " ".join(capfd.readouterr().out.split())
        assert "skipped: mid/mha has scores that cannot be read: " in said
        assert json.loads((out / "compare.json").read_text())["scores"] == {}


def _child(workdir: pathlib.Path, parent: pathlib.Path) -> pathlib.Path:
    """Returns a workdir of a run that started from another's checkpoint."""
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text("{}")
    (workdir / "parent.json").write_text(json.dumps(dict(workdir=str(parent), step=100)))
    return workdir
