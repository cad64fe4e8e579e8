"""The report on logit spectra: its numbers against those of the functions, and what it refuses."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from kvjax.analysis.measures import activations, heads as heads_lib, logits, spectrum, truncation
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.measures.spread import spread
from kvjax.analysis.page import document
from kvjax.analysis.reports.logits import measurements, report as report
from kvjax.analysis.reports.logits.results import Results
from kvjax.analysis.request import Request, reference_length
from kvjax.foundation.errors import UserError
from tests import golden
from tests.convert import workdirs

LENGTHS = (6, 20)
TEXTS = {
    name: np.random.default_rng(seed).integers(0, 256, 64).astype(np.int32)
    for seed, name in enumerate(("one", "two"))
}
REQUEST = Request(TEXTS, LENGTHS)


def _model(block="llama", mechanism=None, **keys):
    block = dataclasses.replace(workdirs.BLOCKS[block], num_layers=2, **keys)
    mechanism = mechanism or workdirs.grouped(2, 2, qk_norm="none")
    return workdirs.Made(workdirs.config(block, mechanism))


@pytest.fixture(scope="module")
def model():
    return _model(window=9)


@pytest.fixture(scope="module")
def measured(model):
    return measurements.measure(model, TEXTS, LENGTHS, perplexity_at=[6], perplexity_tokens=18)


@pytest.fixture(scope="module")
def section(measured):
    return report._section(Results("made", REQUEST, measured))


@pytest.mark.slow
def test_what_is_measured(model, measured):
    """By length, of the first tokens of each text alone."""
    assert measured.ranks == (2, 4) and measured.key_dim == 8
    for i in range(2):
        heads = logits.Interaction(heads_lib.of_layer(model, i))
        energies = measured.energies["M, without RoPE", 0][i, 0]
        np.testing.assert_array_equal(energies, heads.energies())
        far = measured.energies["M, at distances", 20][i]
        assert len(far) == len([0, 1, 2, 4, 8, 16])
        np.testing.assert_array_equal(far[-1], heads.energies_at(16))
        averaged = measured.energies["M, mean over pairs", 20][i, 0]
        np.testing.assert_array_equal(averaged, heads.energies_averaged(20))
    for length in LENGTHS:
        rows_BT = np.stack([tokens_T[:length] for tokens_T in TEXTS.values()])
        for i, layer in enumerate(activations.layers(model, rows_BT)):
            for b in range(2):
                _check_one(measured, layer, (i, b), length)


def _check_one(measured, layer, at, length):
    i, b = at
    query, key, value, plain_query, plain_key = (x[b] for x in layer[:5])

    def close(got, wanted):
        return np.testing.assert_allclose(
            got[i, b], wanted, rtol=1e-4, atol=1e-4 * np.nanmax(np.abs(wanted))
        )

    field = logits.centred_logits(query, key, layer.scale)
    R = min(length, 8)
    close(measured.energies["E", length][..., :R], field.energies_NR)
    plain_field = logits.centred_logits(plain_query, plain_key, layer.scale)
    close(measured.energies["E, without RoPE", length][..., :R], plain_field.energies_NR)
    causal_NL = logits.masked_energies(query, key, layer.scale, layer.mask)
    close(measured.energies["E, causal", length], causal_NL)
    bounds_NR = np.stack([logits.softmax_bound(field, r) for r in (2, 4)], axis=1)
    close(measured.bounds[length], bounds_NR)
    close(measured.keys[length], np.stack(logits.key_geometry(key), axis=1))
    if length > 8:
        close(measured.delocalisation[length], logits.delocalisation(field))
    for mask in (Mask(causal=False), Mask(window=9)):
        errors = truncation.errors(field, value, (2, 4), mask)
        close(measured.errors[length, mask.causal], np.stack(errors, axis=-1))


@pytest.mark.slow
def test_perplexities_are_of_the_first_rows_of_each_text(model, measured):
    for b, tokens_T in enumerate(TEXTS.values()):
        rows_BT = tokens_T[:21].reshape(3, 7)  # 3 rows of 6 tokens and the next one
        for rank in (0, 2, 4):
            attend = truncation.attention_of_rank(rank) if rank else None
            expected = activations.perplexity(model, rows_BT, attend)
            assert measured.perplexity[6, rank][b] == pytest.approx(expected, rel=1e-5)
    exact = {name: tokens_T[:6] for name, tokens_T in TEXTS.items()}  # no token to spare
    found = measurements.measure(model, exact, (6,), perplexity_at=[6])
    rows_BT = TEXTS["one"][None, :6]
    expected = activations.perplexity(model, rows_BT)
    assert found.perplexity[6, 0][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_numbers_of_the_report(model, section):
    """Medians over heads and texts, quartiles of heads, and how texts differ."""
    made = measurements.measure(model, TEXTS, LENGTHS)
    found = {(one["matrix"], one["tokens"]): one for one in section.data["spectra"]}
    for kind in (("M, without RoPE", 0), ("E", 20), ("E, causal", 20)):
        ranks = spectrum.energy_rank(made.energies[kind], 0.9)
        said = found[kind[0], kind[1] or None]["components"]["90%"]
        assert said["median"] == np.median(ranks)
        assert [said["low"], said["high"]] == np.quantile(ranks, [0.25, 0.75]).tolist()
        between = np.std([np.median(ranks[:, b]) for b in range(ranks.shape[1])])
        assert said["between_texts"] == (between if kind[1] else None)
        held = spectrum.cumulative(made.energies[kind])
        median = np.median(held, axis=(0, 1, 2))[:8]
        np.testing.assert_allclose(found[kind[0], kind[1] or None]["cumulative"], median)
    gaps = {(gap["matrix"], gap["tokens"]): gap for gap in section.data["gaps"]}
    m, e = (
        spectrum.energy_rank(made.energies[k], 0.9) for k in (("M, without RoPE", 0), ("E", 20))
    )
    assert gaps["E", 20]["ratio"] == np.median(m) / np.median(e)
    assert gaps["E", 20]["of_heads"] == np.quantile(m / e, [0.25, 0.75]).tolist()
    for b, name in enumerate(TEXTS):
        expected = np.median(m) / np.median(e[:, b])
        assert gaps["E", 20]["by_text"][name] == pytest.approx(expected)
    assert len(gaps) == 3 * len(LENGTHS)
    row = next(
        row
        for row in section.data["attention"]
        if (row["tokens"], row["causal"], row["rank"]) == (20, True, 4)
    )
    mean, worst, output = np.median(made.errors[20, True], axis=(0, 1, 2))[1]
    assert (row["mean"], row["worst"], row["output"]) == (mean, worst, output)
    assert row["bound"] == np.median(made.bounds[20], axis=(0, 1, 2))[1] > row["worst"]
    geometry = section.data["geometry"][1]
    assert geometry["beta"] == np.median(np.nanmax(made.delocalisation[20], axis=-1))
    assert geometry["beta_most"] == np.nanmax(made.delocalisation[20])
    assert geometry["condition"] == np.median(made.keys[20][..., 1])
    perplexities = section.data["perplexity"]
    assert [row["rank"] for row in perplexities] == [None, 2, 4]
    for row in perplexities:
        mean = math.exp(np.mean(np.log(list(row["by_text"].values()))))
        assert row["perplexity"] == pytest.approx(mean)
        assert row["times"] == pytest.approx(mean / perplexities[0]["perplexity"])


def test_spread_leaves_out_what_is_not_there():
    x_LBN = np.arange(8.0).reshape(2, 2, 2)
    x_LBN[1, 1, 1] = np.nan
    found = spread(x_LBN)
    assert (found.median, found.low, found.high) == (3, 1.5, 4.5)
    assert found.between_texts == np.std([2.5, 3])  # of 0, 1, 4, 5 and of 2, 3, 6
    assert spread(x_LBN[:, :1]).between_texts is None


def test_report_is_a_page_and_json(section):
    """Each table beside the paper's numbers; each figure says its numbers in words."""
    json.dumps(section.data, allow_nan=False)
    assert document.page("t", "", [section], {}).count("<svg") == len(section.figures) == 5
    assert len(section.tables) == 6
    for figure in section.figures:
        assert re.search(r"\d", figure.alternative) and figure.text.paper
    for table in section.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
        table.shown()
    ranks, shares, gaps, errors, geometry, perplexity = section.tables
    here = [row for row in ranks.rows if row[0] == "made"]
    assert [row[1] for row in here][:3] == [
        "M, without RoPE",
        "M, at distances",
        "M, mean over pairs",
    ]
    assert len(here) == 3 + 3 * len(LENGTHS)
    assert ["GPT-2 (the paper)", "E", 256, 64, 2, 2, 4, 18, None, None] in ranks.rows
    assert ["GPT-2 (the paper)", "E", 256, 64, None, 90, 96, 98, 99, 100] in shares.rows
    assert ["E of GPT-2 (the paper)", 256, 49, 2, 24.5, None] in gaps.rows
    assert any("0.31 to 0.46" in row for row in errors.rows)
    assert any("2.5 to 5.6 (the paper)" in row for row in geometry.rows)
    assert perplexity.rows[0][1] == "as it is"
    assert "The paper has 5 to 25 times fewer for E than for M" in section.lead


@pytest.mark.slow
def test_models_without_rope_or_mask():
    """They have fewer matrices; those that see all tokens go through the model at each length."""
    seen = _model(causal=False, window=0, positions="none")
    made = measurements.measure(seen, TEXTS, LENGTHS)
    assert set(made.energies) == {("M, without RoPE", 0), ("E", 6), ("E", 20)}
    assert set(made.errors) == {(6, False), (20, False)}
    alone = measurements.measure(seen, TEXTS, LENGTHS[:1])
    np.testing.assert_array_equal(made.energies["E", 6], alone.energies["E", 6])
    assert len(report.section(seen, REQUEST).tables) == 6


@pytest.mark.slow
def test_layers_of_different_shapes():
    """Layers of fewer KV heads, and biases; a key of one head."""
    mechanisms = [workdirs.grouped(4, 2, rank, bias=True, qk_norm="none") for rank in (3, 0)]
    made = measurements.measure(_model("gpt2", mechanisms), TEXTS, (6,))
    keys = made.keys[6]
    assert keys.shape == (2, 2, 4, 2)
    missing = np.isnan(keys).any(axis=(1, 3))
    np.testing.assert_array_equal(missing, [[False] * 4, [False, False, True, True]])
    one = _model(mechanism=dataclasses.replace(workdirs.grouped(1, 1), num_heads=1))
    assert Results("one", REQUEST, measurements.measure(one, TEXTS, LENGTHS)).num_heads == 2


def test_the_lead_has_the_ratio_of_components(measured):
    def lead(of_e):
        def flat(r, shape):
            return np.broadcast_to(np.arange(shape[-1]) < r, shape).astype(float)

        energies = {
            ("M, without RoPE", 0): flat(4, (2, 1, 4, 64)),
            ("E", 20): flat(of_e, measured.energies["E", 20].shape),
        }
        found = dataclasses.replace(measured, energies=energies)
        return report._lead(Results("m", REQUEST, found))

    assert "E 1 (4.0 times fewer; middle half of heads 4.0 to 4.0). The paper has" in lead(1)
    assert "; E is zero. The paper has" in lead(0)


@pytest.mark.slow
def test_numbers_of_heads_are_there(measured, section):
    """Rounded to six digits: by layer, text and head."""
    (found,) = (
        one
        for one in section.data["attention_of_heads"]
        if (one["tokens"], one["causal"]) == (20, True)
    )
    np.testing.assert_allclose(found["values"], measured.errors[20, True], rtol=1e-5)
    np.testing.assert_allclose(found["bounds"], measured.bounds[20], rtol=1e-5)
    (found,) = (one for one in section.data["geometry_of_heads"] if one["tokens"] == 20)
    np.testing.assert_allclose(
        found["beta"], np.nan_to_num(measured.delocalisation[20]).max(-1), rtol=1e-5
    )
    ranks = section.data["components_of_heads"]["E, 20 tokens"]
    expected = spectrum.energy_rank(measured.energies["E", 20], 0.99)
    np.testing.assert_array_equal(ranks["99%"], expected)


@pytest.mark.slow
def test_heads_that_see_nothing():
    """Queries of zeros: spectra of nothing are no components, and nothing fails."""
    model = _model()
    query = model.weights[("segments", 0, "attention", "mechanism", "query")]
    query[1] = 0
    ranks = report.section(model, REQUEST).data["components_of_heads"]
    matrices = [x["90%"] for x in ranks.values()]
    assert len(matrices) == 3 + 3 * len(LENGTHS)
    for first, second in matrices:
        assert np.min(first) > 0 and np.max(second) == 0
    query[:] = 0
    found = report.section(model, REQUEST)
    assert {gap["of_e"] for gap in found.data["gaps"]} == {0}
    assert found.tables[2].rows[0][4] is None
    assert found.data["attention"][0]["bound"] == found.data["attention"][0]["worst"] == 0


def test_lengths():
    assert reference_length((64, 256, 1024)) == 256
    assert reference_length((32, 100)) == 100
    assert measurements.distances(256) == [0, 1, 2, 4, 8, 16, 32, 64, 128]
    assert measurements.distances(2) == [0, 1]


def test_bad_input(model):
    short = TEXTS | dict(one=np.zeros(90, np.int32))
    cases = {
        r"text 'two' has 64 tokens, fewer than the length 80": Request(short, (6, 80)),
        "lengths = 1: must be at least 2": Request(TEXTS, (1, 6)),
    }
    for message, request in cases.items():
        with pytest.raises(UserError, match=message):
            report.section(model, request)
    with pytest.raises(UserError, match="lengths = 50: learned positions reach 40 tokens: give"):
        report.section(_model("gpt2"), Request(TEXTS, (50,)))
    shared = workdirs.grouped(4, 1, 3, qk_norm="rms_gain", rope="shared")
    with pytest.raises(UserError, match="not linear"):
        report.check(_model(mechanism=shared), REQUEST)
    report.check(model, REQUEST)


def test_what_is_not_finite_is_named():
    model = _model()
    model.weights[("segments", 0, "attention", "mechanism", "query")][1, :, 3] = np.nan
    with pytest.raises(UserError, match=r"layer 1 of made: .* queries .* of heads \[3\]"):
        report.section(model, REQUEST)
    model = _model()
    model.weights[("embedding",)][TEXTS["one"][3]] = np.inf
    with pytest.raises(UserError, match=r"layer 0 of made: queries on the text are not finite"):
        report.section(model, REQUEST)


def test_all_that_it_says(model, measured, monkeypatch):
    """Perplexity is measured at the length nearest to the paper's, and at the longest."""
    asked = []

    def noted(*given, **at):
        return (asked.append((given, at)), measured)[1]

    monkeypatch.setattr(measurements, "measure", noted)
    golden.note_drawings(monkeypatch)
    golden.check(report.section(model, REQUEST))
    assert asked == [((model, TEXTS, LENGTHS), dict(perplexity_at=[20]))]
