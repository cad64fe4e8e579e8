"""The report on logit spectra: its measurements and text."""

import dataclasses

import numpy as np
import pytest

from kvjax.analysis.measures import activations, heads as heads_lib, logits, truncation
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.measures.spread import spread
from kvjax.analysis.reports.logits import measurements, report
from kvjax.analysis.reports.logits.results import Results
from kvjax.analysis.request import Request, reference_length
from kvjax.foundation.errors import UserError
from tests import golden
from tests.analysis import models
from tests.convert import workdirs

LENGTHS = (6, 20)
TEXTS = models.texts(64)
REQUEST = Request(TEXTS, LENGTHS)


@pytest.fixture(scope="module")
def model():
    return models.model(window=9)


@pytest.fixture(scope="module")
def measured(model):
    return measurements.measure(model, TEXTS, LENGTHS, perplexity_at=[6], perplexity_tokens=18)


@pytest.mark.slow
def test_measurements(model, measured):
    """Compares each text's first tokens, by length, with the functions."""
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
                _check_sequence(measured, layer, (i, b), length)


def _check_sequence(measured, layer, at, length):
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


def test_spread_ignores_nan():
    x_LBN = np.arange(8.0).reshape(2, 2, 2)
    x_LBN[1, 1, 1] = np.nan
    found = spread(x_LBN)
    assert (found.median, found.low, found.high) == (3, 1.5, 4.5)
    assert found.between_texts == np.std([2.5, 3])  # of 0, 1, 4, 5 and of 2, 3, 6
    assert spread(x_LBN[:, :1]).between_texts is None


@pytest.mark.slow
def test_models_without_rope_or_mask():
    """Have fewer matrices; without a causal mask each length is a pass of its own."""
    acausal = models.model(causal=False, window=0, positions="none")
    made = measurements.measure(acausal, TEXTS, LENGTHS)
    assert set(made.energies) == {("M, without RoPE", 0), ("E", 6), ("E", 20)}
    assert set(made.errors) == {(6, False), (20, False)}
    single_length = measurements.measure(acausal, TEXTS, LENGTHS[:1])
    np.testing.assert_array_equal(made.energies["E", 6], single_length.energies["E", 6])
    assert len(report.section(acausal, REQUEST).tables) == 6


@pytest.mark.slow
def test_layers_of_different_shapes():
    """Pads layers of fewer KV heads; a model of one head."""
    mechanisms = [workdirs.grouped(4, 2, rank, bias=True, qk_norm="none") for rank in (3, 0)]
    made = measurements.measure(models.model("gpt2", mechanisms), TEXTS, (6,))
    keys = made.keys[6]
    assert keys.shape == (2, 2, 4, 2)
    missing = np.isnan(keys).any(axis=(1, 3))
    np.testing.assert_array_equal(missing, [[False] * 4, [False, False, True, True]])
    one = models.model(mechanism=dataclasses.replace(workdirs.grouped(1, 1), num_heads=1))
    assert Results("one", REQUEST, measurements.measure(one, TEXTS, LENGTHS)).num_heads == 2


@pytest.mark.slow
def test_queries_of_zeros_have_no_components():
    model = models.model()
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


def test_heads_without_matrices_are_refused(model):
    shared = workdirs.grouped(4, 1, 3, qk_norm="rms_gain", rope="shared")
    with pytest.raises(UserError, match="not linear"):
        report.check(models.model(mechanism=shared), REQUEST)
    report.check(model, REQUEST)


def test_report_is_as_before(model, measured, monkeypatch):
    """Compares with a file; perplexity is of the length nearest to the paper's, and the longest."""
    models.check_section(report._section(Results("made", REQUEST, measured)))
    calls = []

    def noted(*given, **at):
        return (calls.append((given, at)), measured)[1]

    monkeypatch.setattr(measurements, "measure", noted)
    golden.note_drawings(monkeypatch)
    golden.check(report.section(model, REQUEST))
    assert calls == [((model, TEXTS, LENGTHS), dict(perplexity_at=[20]))]
