"""The study of logit spectra: the gap between weights and logits, from reports."""

import json
import types

import numpy as np
import pytest

from experiments import record
from experiments.analysis import report as report_lib
from experiments.analysis.spectra import LEAST, MOST, Spectra
from experiments.studies import logit_spectra
from kvjax.analysis import reports
from kvjax.analysis.request import Request
from kvjax.foundation import command_line
from tests.experiments.conversion import whisper_stand_in as stand_in

WEIGHTS, FIELD = "M, without RoPE", "E"
CAUSAL, PLAIN = "E, causal", "E, without RoPE"
# [layers, texts, heads]: 2 of each; M has one text.
RANKS = {
    WEIGHTS: [[[40, 44]], [[48, 52]]],
    f"{FIELD}, 64 tokens": [[[2, 4], [4, 4]], [[8, 8], [4, 13]]],
    f"{FIELD}, 256 tokens": [[[4, 8], [8, 8]], [[16, 16], [8, 26]]],
    f"{CAUSAL}, 64 tokens": [[[20, 20], [20, 20]], [[20, 20], [20, 20]]],
    f"{CAUSAL}, 256 tokens": [[[60, 60], [60, 60]], [[60, 60], [60, 60]]],
}


def _data(model="made", ranks=RANKS):
    def middle(x):
        return dict(median=float(np.median(x)), low=1.0, high=2.0, between_texts=None)

    spectra = []
    for name, x in ranks.items():
        matrix, _, tokens = name.rpartition(", ")
        matrix, tokens = (matrix, int(tokens.split()[0])) if "tokens" in name else (name, None)
        about = dict(matrix=matrix, tokens=tokens, cumulative=[1.0])
        spectra.append(about | dict(components={"90%": middle(x)}))
    attention = dict(tokens=64, rank=10, mean=0.4, worst=1.1, output=0.2, bound=30.0)
    attention = [attention | dict(causal=causal) for causal in (False, True)]
    changed = dict(tokens=64, rank=10, perplexity=9.0, times=1.25, by_text={})
    return dict(
        model=model,
        channels=64,
        num_heads=4,
        texts=["one", "two"],
        lengths=[64, 256],
        spectra=spectra,
        attention=attention,
        geometry=[],
        perplexity=[changed],
        components_of_heads={name: {"90%": x} for name, x in ranks.items()},
    )


def test_the_gap_is_of_medians_and_of_each_heads_own():
    gaps = {(gap.matrix, gap.tokens): gap for gap in Spectra(_data()).gaps()}
    assert list(gaps) == [(FIELD, 64), (FIELD, 256), (CAUSAL, 64), (CAUSAL, 256)]
    gap = gaps[FIELD, 64]
    assert gap.of_m == 46 and gap.of_e == 4 and gap.ratio == 11.5 and gap.verdict == "holds"
    each = [20, 11, 10, 11, 6, 6.5, 12, 4]  # 40/2, 44/4, ... 52/13
    assert gap.median == np.median(each) and gap.high == np.quantile(each, 0.75)
    assert gap.heads_within == 7 / 8  # 4 is below the paper's 4.75
    assert gap.between_texts == np.std([6, 4])  # medians of 2, 4, 8, 8 and 4, 4, 4, 13
    assert gaps[FIELD, 256].verdict == "holds" and gaps[CAUSAL, 256].verdict == "fewer"
    few = RANKS | {f"{FIELD}, 64 tokens": np.ones((2, 2, 2)).tolist()}
    assert next(Spectra(_data(ranks=few)).gaps()).verdict == "more"


def test_the_published_range_is_that_of_its_table():
    assert LEAST == 38 / 8 and MOST == 49 / 2


def test_lengths_and_masks_are_compared_head_by_head():
    found = Spectra(_data())
    assert found.growth() == {FIELD: [2.0, 2.0, 2.0], CAUSAL: [3.0, 3.0, 3.0]}
    each = [10, 5, 5, 5, 2.5, 2.5, 5, 20 / 13]
    assert found.causality()[64] == pytest.approx(np.quantile(each, (0.25, 0.5, 0.75)).tolist())
    assert found.rope() == {}  # the model has no RoPE
    turned = RANKS | {f"{PLAIN}, {n} tokens": RANKS[f"{FIELD}, 64 tokens"] for n in (64, 256)}
    assert Spectra(_data(ranks=turned)).rope() == {64: [1.0] * 3, 256: [2.0] * 3}


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Returns a function of options, in a folder with a report of SmolLM2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(logit_spectra, "of_smollm2", None)  # would make a report
    monkeypatch.setattr(logit_spectra, "of_whisper", None)
    _write(tmp_path / "runs/analysis/SmolLM2-135M", "SmolLM2")

    def run(*options):
        status = command_line.status(logit_spectra.main, options)
        return status, *capsys.readouterr()

    return run


def _write(folder, model):
    folder.mkdir(parents=True)
    found = dict(about=dict(Command="x", Date="y"), reports=dict(logits=dict(data=_data(model))))
    (folder / "report.json").write_text(json.dumps(found))


def test_reports_that_are_there_are_read(run, tmp_path):
    status, out, err = run("--models=smollm2")
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80
    _write(tmp_path / "runs/analysis/Whisper-tiny.en", "Whisper")
    status, out, err = run("--json", "--markdown", "--save")
    assert status == 0 and "|---" in err and out.count("\n") == 1
    found = json.loads(out)
    saved = json.loads((record.RESULTS / "analysis" / "logit_spectra.json").read_text())
    assert list(saved["models"]) == ["SmolLM2-135M", "Whisper-tiny.en"]
    assert saved["models"] == found["models"] and saved["made_by"]["packages"]["jax"]
    assert found["reports"]["SmolLM2-135M"] == dict(Date="y")


@pytest.mark.slow
def test_whispers_report_is_made_and_read(monkeypatch, tmp_path):
    stand_in.write(tmp_path)
    monkeypatch.setattr(reports, "NAMES", ("diversity", "logits"))
    monkeypatch.setitem(logit_spectra.LENGTHS, "whisper", (8, 16))
    folder = tmp_path / "report"
    logit_spectra.of_whisper(str(tmp_path), folder, 2)
    spectra, about = logit_spectra.read(folder)
    assert spectra.lengths == [8, 16] and spectra.channels == stand_in.H
    assert len(spectra.data["texts"]) == 4 and not spectra.rope()
    assert spectra.ranks(FIELD, 16).shape == (2, 4, stand_in.N)
    assert "Whisper" in about["Model"] and "<svg" in (folder / "report.html").read_text()
    assert all(logit_spectra.tables([spectra]))


def test_reports_that_refuse_a_model_are_left_out(monkeypatch, tmp_path, capsys):
    def refuse(model, request):
        raise report_lib.UserError("nothing to see")

    monkeypatch.setattr(reports, "NAMES", ("no",))
    monkeypatch.setattr(reports, "module", lambda name: types.SimpleNamespace(check=refuse))
    model = types.SimpleNamespace(name="made")
    report_lib.write(model, Request({}, ()), tmp_path, "What it is.")
    assert "without no: nothing to see" in capsys.readouterr().err
    assert json.loads((tmp_path / "report.json").read_text())["reports"] == {}
