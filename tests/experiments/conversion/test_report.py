"""The conversion report: tables and figures from saved results."""

import json

import numpy as np
import pytest

from experiments import record
from experiments.conversion import outcomes as outcomes_lib, plots, records, tables
from kvjax.foundation import record_lines
from kvjax.foundation.intervals import estimate

pytestmark = pytest.mark.usefixtures("small")


def _write(name, **result):
    record_lines.put(records.file(), name, {"seconds": 1.0} | result)


@pytest.fixture
def results():
    """Writes synthetic results of Whisper."""
    settings = dict(row_length=128, validation_rows=64, calibration_rows=256)
    original = dict(perplexity=100.0, cached=3072, share=1.0, num_heads=6, head_dim=64)
    _write("whisper/before/original", settings=settings, **original)
    losses = dict(key=(50, 25, 2, 1), query=(90, 60, 20, 4), value=(9, 8, 7, 6), both=(400, 99, 9))
    for part, of in losses.items():
        points = [
            dict(rank=rank, cached=1536 + 4 * rank, share=0.5 + rank / 768, perplexity=100.0 + loss)
            for rank, loss in zip((64, 96, 192, 256), of, strict=False)
        ]
        for objective in ("weights", "outputs"):
            half = [p | dict(perplexity=50 + p["perplexity"] / 2) for p in points]
            made = points if objective == "weights" else half
            for mode in ("joint", "per_head"):
                _write(f"whisper/before/{part}_{mode}_{objective}", settings=settings, points=made)
    common = settings | dict(steps=48, batch=8, tune="qkv", rate=5e-4, teacher_share=0.0)
    after = dict(control=(80.0, 81.0, 82.0), lrkv_r32=(84.0, 84.0, 86.0), thin_r128=(88.0, 90.0))
    for variant, values in after.items():
        cached = 3072 if variant == "control" else 2048
        for seed, value in enumerate(values):
            keys = dict(seed=seed, variant=variant)
            figures = dict(cached=cached, share=cached / 3072, before=120.0, after=value)
            name = f"whisper/after/qkv_text_rate0.0005/{variant}_seed{seed}"
            _write(name, settings=common | keys, **figures)


@pytest.mark.slow
def test_tables_have_the_figures_of_the_records(run, results):
    status, out, _ = run("--markdown")
    assert status == 0
    assert "| 96 | 199 (+99.0 %) | 125 (+25.0 %) | 160 (+60.0 %) | 108 (+8.0 %) |" in out
    assert "| 256 | - | 101 (+1.0 %) | 104 (+4.0 %) | 106 (+6.0 %) |" in out
    assert "| 192 | 75.0% | 102 (+2.0 %) | 101 (+1.0 %) | 102 (+2.0 %) | 101 (+1.0 %) |" in out
    assert "| 192 | 2,304 | 50% | 25% | +1.0 % |" in out
    assert "queries, keys and values trained on text, 49,152 tokens, rate 0.0005" in out
    half = estimate([80.0, 81.0, 82.0]).half
    assert f"| none (the control) | 100.0% | 120 (+20.0 %) | 81.0 ± {half:.1f} |" in out
    changes = [84 / 80 - 1, 84 / 81 - 1, 86 / 82 - 1]
    half = 100 * estimate(changes).half
    assert f"| {100 * np.mean(changes):+.1f} % ± {half:.1f} |" in out
    assert "Perplexity of 8,192 held-out tokens; before conversion 100." in out
    record_lines.put(records.file(), "whisper/before/original", None)
    status, out, _ = run("--json")
    assert status == 0 and json.loads(out) == dict(name="conversion", tables=[])


@pytest.mark.slow
def test_pictures_are_of_the_files_and_the_same_each_time(results):
    files = plots.write()
    assert [file.name for file in files] == ["whisper_cache.png"]
    first = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in plots.write()] == first
    before, after = plots.by_cache_size(outcomes_lib.Outcomes("whisper")).axes
    drawn = {line.get_label(): line for line in before.lines}
    of_keys = drawn["thin keys, one SVD of the weights"]
    assert list(of_keys.get_ydata()) == [150, 125, 102, 101]
    assert list(of_keys.get_xdata()) == [0.5 + rank / 768 for rank in (64, 96, 192, 256)]
    labels = [text.get_text() for text in after.get_legend().get_texts()]
    assert labels == ["thin keys, a latent for each head", "LRKV"]
    (lrkv,) = (c for c in after.containers if c.get_label() == "LRKV")
    assert lrkv.lines[0].get_ydata() == pytest.approx([np.mean((84, 84, 86))])


def test_no_picture_without_results():
    assert plots.write() == []


def test_saved_results_make_a_report(monkeypatch):
    """The split of SmolLM2's cache has one rank, other curves of its table five."""
    monkeypatch.setattr(record, "RESULTS", record.EXPERIMENTS / "results")
    made = tables.report()
    (table,) = [t for t in made if "SmolLM2" in t.title and "keys and values, by" in t.title]
    assert [row[0] for row in table.rows] == [8, 16, 24, 32, 48]
    assert [row[-1] == "-" for row in table.rows] == [True, True, True, False, True]
    assert not any("Failed" in table.title for table in made)
