"""The command: tables, page, picture, scores, user errors."""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from kvjax.analysis.page import document, draw
from kvjax.analysis.page.section import Point
from kvjax.compare import (
    __main__ as command,
    report,
)
from kvjax.foundation import json_text, provenance
from kvjax.foundation.checkout import ROOT
from tests import golden
from tests.compare.command import run
from tests.compare.written import grouped, write_run


def test_the_command_draws(two, tmp_path):
    out = tmp_path / "out"
    assert run(two, f"--out={out}", "--against=mha_tiny") == 0
    html = (out / "compare.html").read_text()
    assert html.count('class="curves"') == 5 and 'data-series="1"' in html
    assert 'http-equiv="refresh"' not in html
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_outputs_are_as_before(drawn, tmp_path, capfd, monkeypatch):
    """Covers several seeds, a missing seed, two lengths and speeds, scores, a skipped run.

    JSON, page and picture have the contents of the sections.
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
        shorter = dict(seed=seed, num_steps=50, steps=(25, 50), bpb=(3.5, 2.5 + seed / 20))
        write_run(folder / f"d{seed}", **shorter)
    write_run(folder / "z", seed=7, steps=(25,), bpb=(4,))
    monkeypatch.chdir(tmp_path)
    assert run("runs", "--out=out", "--against=mha_tiny", "--json") == 0
    printed, text = capfd.readouterr()
    golden.check_text(re.sub(r"[\d.]+ MB", "some MB", text), "compare/printed", 1e-3)
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
    skipped = dict(left_out=[left_out | dict(may_come=True)], lacking=lacking)
    data = {section.name: json_text.plain(section.data) for section in sections}
    sentences = result.pop("verdict")
    assert result == data["results"] | skipped
    software = provenance.software("matplotlib")
    names = [f"runs/{name}" for name in "a0 a1 a2 b0 b1 b2 c d0 d1".split()]
    about = {
        "Runs": ", ".join(names),
        "Data set": hashlib.sha256(b'{"dataset": "data"}').hexdigest()[:16],
        "Command": software["command"],
        "Date": software["date"],
        "Commit": software["commit"],
        "Versions": {"python": software["python"]} | software["packages"],
    }
    savings = stored.pop("savings")
    scores = {f"runs/a{i}": dict(combined=30 + 2.5 * i, core=20) for i in range(3)}
    scores["runs/b1"] = dict(core=15)
    stored_scores = stored.pop("scores")
    assert {name: pytest.approx(values) for name, values in scores.items()} == stored_scores
    assert stored == data["results"] | skipped | dict(
        about=about, curves=data["curves"], verdict=sentences
    )
    assert savings[1] == dict(
        leader="mha_tiny",
        behind="mqa_tiny",
        tokens=819_200,
        within_a_run=dict(mean=pytest.approx(0.4), half=None),
        at_equal_horizon=None,
    )
    summary = [Point("", sentence) for sentence in sentences]
    page = document.page("Runs compared", command._LEAD, sections, about, summary=summary)
    assert (tmp_path / "out" / "compare.html").read_text() == page
    assert (tmp_path / "out" / "compare.png").read_bytes() == b"a picture"


def test_long_curves_are_thinned(tmp_path):
    """Keeps steps spaced evenly and geometrically. A run without times has no axis of them."""
    count = 1000
    options = dict(num_steps=count, steps=range(1, count + 1), bpb=np.linspace(4, 2, count))
    (write_run(tmp_path / "a", **options) / "timing.jsonl").unlink()
    groups = grouped(tmp_path / "a")
    tokens_per_step = 32 * 256
    kept = {round(x) for x in np.linspace(1, count, 100)}
    kept = sorted(kept | {round(x) for x in np.geomspace(1, count, 100)})
    assert report._axes(groups) == ["tokens", "flops", "six_n"]
    drawn = report._lines(groups, "tokens")
    assert drawn["x"] == "tokens, millions" and drawn["bands"] == {}
    xs, ys = drawn["series"]["lrkv_tiny"]
    np.testing.assert_allclose(xs, tokens_per_step * np.array(kept) / 1e6)
    np.testing.assert_allclose(ys, options["bpb"][np.array(kept) - 1])
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


@pytest.mark.parametrize(
    ("arguments", "pattern"),
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
def test_user_errors_are_one_line(two, capfd, arguments, pattern):
    formatted = [argument.format(runs=two) for argument in arguments]
    out = [] if any("--out" in argument for argument in formatted) else [f"--out={two.parent}/out"]
    assert run(*formatted, *out) == 2
    message = capfd.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    assert re.search(pattern, message), message


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
def test_no_device_is_needed(two, tmp_path):
    """A watched run may hold all of them; here JAX finds none."""
    command = [sys.executable, "-m", "kvjax.compare", str(two), f"--out={tmp_path / 'out'}"]
    environment = os.environ | dict(JAX_PLATFORMS="tpu")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "compare.html").exists()


def _evaluated(workdir: pathlib.Path, step: int, **scores) -> None:
    folder = workdir / "evaluations" / str(step)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(scores))


def test_final_losses_against_caches_and_scores(drawn, tmp_path, capfd, monkeypatch):
    """A run has its own score, or the score of a run that started from it."""
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
        (mid / mechanism / "evaluations" / "2000").mkdir()  # without a summary yet
    _evaluated(_child(mid / "twice", (base / "mha").resolve()), 700, core=0.5)
    _child(mid / "yet", (base / "mha").resolve())
    _evaluated(write_run(mid / "other"), 100, combined=dict(value=0.9))
    assert run(base, f"--scores={mid}", f"--out={out}", "--json") == 0
    stored = json.loads((out / "compare.json").read_text())
    scores = {pathlib.Path(name).name: values for name, values in stored["scores"].items()}
    assert scores == {name: dict(combined=100 * y) for name, (_, y) in bpb_and_score.items()}
    why = {
        "other": ("is neither a compared run nor started from one", False),
        "twice": ("is a second evaluation of base/mha", False),
        "yet": ("was not evaluated", True),
    }
    assert {x["name"]: (x["why"], x["may_come"]) for x in stored["left_out"]} == {
        f"mid/{name}": reason for name, reason in why.items()
    }
    caches, score = drawn[0][0][0].figures
    assert caches.alternative.startswith("gqa_tiny: 2.3 at 1,024; lrkv_tiny: 2.1 at 1,600;")
    assert score.alternative.startswith("gqa_tiny: 34 at 2.3; lrkv_tiny: 37 at 2.1;")
    expected = stats.linregress(*zip(*bpb_and_score.values(), strict=True)).rvalue ** 2
    assert f"R² = {expected:.3f} over 4 points." in score.caption
    for damaged in (
        '{"combined": "a"}',
        '{"combined": {"value": true}}',
        '{"core": [1]}',
        "{",
    ):
        (mid / "mha" / "evaluations" / "1000" / "summary.json").write_text(damaged)
        capfd.readouterr()
        assert run(base, "--scores=mid/mha", f"--out={out}") == 0  # curves are compared
        printed = " ".join(capfd.readouterr().out.split())
        assert "skipped: mid/mha has scores that cannot be read: " in printed
        assert json.loads((out / "compare.json").read_text())["scores"] == {}


def _child(workdir: pathlib.Path, parent: pathlib.Path) -> pathlib.Path:
    """Returns a workdir of a run that started from another's checkpoint."""
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text("{}")
    (workdir / "parent.json").write_text(json.dumps(dict(workdir=str(parent), step=100)))
    return workdir
