"""The report on fixed subspaces of keys: its measurements, verdicts and text."""

import dataclasses
import functools

import numpy as np
import pytest

from kvjax.analysis.measures import (
    activations,
    cut_keys,
    heads as heads_lib,
    key_subspaces,
    spectrum,
    subspace_methods,
)
from kvjax.analysis.measures.cut_keys import Cut
from kvjax.analysis.measures.subspace_methods import AFTER, BEFORE
from kvjax.analysis.reports.compression import measurements, report, tables
from kvjax.analysis.reports.compression.results import Results
from kvjax.analysis.request import Request
from kvjax.foundation.errors import UserError
from tests import golden
from tests.analysis import models
from tests.convert import workdirs

LENGTHS = (16, 40)
TEXTS = models.texts(200)
REQUEST = Request(TEXTS, LENGTHS)
SHORT = {name: tokens_T[:16] for name, tokens_T in TEXTS.items()}


@pytest.fixture(scope="module")
def model():
    return models.model(window=9)


@pytest.fixture(scope="module")
def measured(model):
    return measurements.measure(model, TEXTS, 16, 40)


# -- what is measured ------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_and_spectra(model, measured):
    """Against the subspaces made one by one."""
    windows = subspace_methods.windows(TEXTS, 16, 40)
    layers = zip(heads_lib.layers(model), activations.layers(model, windows.rows()), strict=True)
    for i, (heads, layer) in enumerate(layers):
        rope, at = key_subspaces.rope_of(heads), slice(4 * i, 4 * i + 4)
        weights = key_subspaces.of_weights(heads.key_DKH, np.zeros((2, 8)))
        joint = key_subspaces.of_weights(heads.key_DKH, np.zeros((2, 8)), together=True)
        for b in range(4):
            of_rows = functools.partial(subspace_methods.of_rows, layer, rope)
            others = range(8, 12) if b < 2 else range(4, 8)
            expected = {
                (subspace_methods.WEIGHTS, BEFORE): (weights, 4),
                (subspace_methods.JOINT, BEFORE): (joint, 8),
            }
            for where in (BEFORE, AFTER):
                expected |= {
                    (subspace_methods.CALIBRATED, where): (of_rows(where, range(4, 12)), 4),
                    (subspace_methods.OTHERS, where): (of_rows(where, others), 4),
                    (subspace_methods.CONTEXT, where): (of_rows(where, [b]), 4),
                    (subspace_methods.FIRST_HALF, where): (of_rows(where, [b], slice(8)), 4),
                }
            mean = expected[subspace_methods.CALIBRATED, BEFORE][0].center_JC
            expected[subspace_methods.WEIGHTS_MEAN, BEFORE] = (weights._replace(center_JC=mean), 4)
            assert set(expected) == set(measured.errors)
            for method, (subspaces, r) in expected.items():
                if method[1] == BEFORE:
                    cut = key_subspaces.rotate_by_position(
                        subspaces.cut(layer.plain_key_BTKH[b], r), rope
                    )
                else:
                    cut = subspaces.cut(layer.key_BTKH[b], r)
                errors = key_subspaces.errors(layer, b, [cut], slice(8, None))
                found = measured.errors[method][b, at, 2]
                np.testing.assert_allclose(found[:, 0], errors.logit_NA[:, 0], rtol=1e-4)
                np.testing.assert_allclose(found[:, 1], errors.output_NA[:, 0], rtol=1e-4)
        plain_TKH = layer.plain_key_BTKH[3].astype(np.float64)
        for k in range(2):
            for x_TH, name in (
                (heads.key_DKH[:, k], measurements.SPECTRUM_WEIGHTS),
                (plain_TKH[:, k], measurements.SPECTRUM_KEYS),
                (plain_TKH[:, k] - plain_TKH[:, k].mean(0), measurements.SPECTRUM_CENTRED),
            ):
                energy = np.linalg.svd(x_TH, compute_uv=False) ** 2
                expected = [spectrum.energy_rank(energy, 0.9), 8, 8]
                found = measured.spectra[name][0 if x_TH.shape[0] == 24 else 3, 2 * i + k]
                assert found.tolist() == expected
    assert measured.spectra[measurements.SPECTRUM_JOINT].shape == (1, 2, 3)
    assert measured.spectra[measurements.SPECTRUM_JOINT][0, 0, 1:].tolist() == [16, 16]
    assert measured.spectra[measurements.SPECTRUM_LOGITS].shape == (4, 8, 3)


@pytest.mark.slow
def test_runs_are_those_of_the_ways(model, measured):
    """Cuts keys at each method's place and rank; losses are of the second halves."""
    windows = subspace_methods.windows(TEXTS, 16, 40)
    ranks = {(subspace_methods.CONTEXT, AFTER): 4, (subspace_methods.JOINT, BEFORE): 8}
    runs = cut_keys.Runs(model, windows.measured_BT[:, :-1], list(ranks))
    layers = zip(heads_lib.layers(model), activations.layers(model, windows.rows()), strict=True)
    for i, (heads, layer) in enumerate(layers):
        subspaces = subspace_methods.of_layer(heads, layer, windows, rotates=True, joint=True)
        cuts = {
            method: Cut(subspaces[method], r, after_rope=method[1] == AFTER)
            for method, r in ranks.items()
        }
        runs.layer(i, cuts, heads.rotated)
    for method, nats_BT in runs.losses(windows.measured_BT[:, 9:]).items():
        np.testing.assert_allclose(measured.nats[method, 1 / 2], nats_BT, atol=1e-4)
        assert np.abs(nats_BT - measured.nats[None]).max() > 1e-3


def test_fixed_subspaces_of_each_text():
    """Drift uses one subspace per text: of its first row."""
    windows = subspace_methods.windows({name: np.arange(32) for name in "ab"}, 15, 32)
    one, other = (
        key_subspaces.Subspaces(np.zeros((1, 4)), np.eye(4)[None], i * np.eye(4)[None])
        for i in (1, 2)
    )
    ways = {(subspace_methods.CALIBRATED, AFTER): [one, one, other, other]}
    ways[subspace_methods.CONTEXT, BEFORE] = [one] * 4
    found = measurements._fixed(ways, windows)
    assert [each.write_JRC[0, 0, 0] for each in found[AFTER]] == [1, 2]
    assert found[BEFORE] == [None, None]


@pytest.mark.slow
def test_drift(model, measured):
    """Drift on the longest rows; the last two errors are those of all tokens and of other text."""
    assert measured.drift_at == (5, 10, 20) and measured.drift_rank == 2
    rows_BT = np.stack([tokens_T[:40] for tokens_T in TEXTS.values()])
    windows = subspace_methods.windows(TEXTS, 16, 40)
    other = list(activations.layers(model, windows.rows()))
    layers = zip(heads_lib.layers(model), activations.layers(model, rows_BT), strict=True)
    for i, (heads, layer) in enumerate(layers):
        rope = key_subspaces.rope_of(heads)
        for where in (BEFORE, AFTER):
            made = [
                subspace_methods.of_rows(layer, rope, where, [1], tokens).first(2)
                for tokens in (slice(10), np.arange(2, 40, 4), slice(40))
            ]
            found = measured.overlap[where][1, 2 * i : 2 * i + 2, 1]
            for j in (0, 1):
                expected = key_subspaces.overlap(made[j], made[2])
                np.testing.assert_allclose(found[:, j], expected, rtol=1e-3)
            fixed = subspace_methods.of_rows(other[i], rope, where, range(4, 12))
            cuts = [
                subspace_methods.cut_keys(layer, rope, 1, where, one, 2) for one in (*made, fixed)
            ]
            errors = key_subspaces.errors(layer, 1, cuts, slice(20, None)).logit_NA
            found = measured.drift_error[where][1, 4 * i : 4 * i + 4]
            np.testing.assert_allclose(found[:, [1, 4, 6, 7]], errors, rtol=1e-3)


# -- verdicts and text -----------------------------------------------------------------------------


M, W = measurements.SPECTRUM_INTERACTION, measurements.SPECTRUM_WEIGHTS
ALL_HEADS = measurements.SPECTRUM_JOINT
FIXED, JOINT = subspace_methods.CALIBRATED, subspace_methods.JOINT
CONTEXT = subspace_methods.CONTEXT
NOISE = 0.3 * np.random.default_rng(0).normal(size=(4, 8))


@pytest.fixture
def claims(measured):
    """Returns a function from spectra and nats added by methods to numbers and verdicts."""

    def claims_of(spectra, costs):
        spectra = measured.spectra | {
            name: np.array([[numbers]]) for name, numbers in spectra.items()
        }
        base = measured.nats[None]
        nats = {x: base + costs.get(x and x[0][0], 0.0) for x in measured.nats}
        found = dataclasses.replace(measured, spectra=spectra, nats=nats)
        rows = tables.tables(Results("m", REQUEST, found))[0].rows
        return [row[2] for row in rows], [row[3] for row in rows]

    return claims_of


def test_numbers_of_claims(claims):
    here, _ = claims({M: [6, 8, 8], W: [3, 8, 8]}, {FIXED: 0.01, JOINT: 0.02})
    assert here[:3] == ["6 of 8 components", "3 of 8 components", "+2.0 % (+2.0 to +2.0)"]
    assert here[3] == (
        "fixed +1.0 % (+1.0 to +1.0), of the context +0.0 % (+0.0 to +0.0), "
        "ratio +1.0 % (+1.0 to +1.0)"
    )
    here, _ = claims({ALL_HEADS: [5, 8, 16], W: [3, 4, 8]}, {})
    assert here[1] == "3 of 4 components (rank 4 of 8 by construction)"


@pytest.mark.parametrize(
    ("spectra", "costs", "verdicts"),
    [
        ({M: [6, 8, 8], W: [3, 8, 8]}, {FIXED: 0.01, JOINT: 0.02}, "holds holds holds no"),
        ({M: [4, 8, 8], W: [5, 8, 8]}, {FIXED: 0.3, JOINT: 0.3}, "no no no holds"),
        ({}, {FIXED: 0.3, CONTEXT: 0.29}, "* * * no"),
        ({}, {FIXED: 0.3, CONTEXT: 0.1}, "* * * holds"),
        ({}, {FIXED: 0.04, CONTEXT: -0.04}, "* * * holds"),  # the ratio counts
        ({}, {FIXED: 0.06 + NOISE, JOINT: 0.04 + NOISE}, "* * undecided undecided"),
        ({}, {FIXED: 0.5 + NOISE, JOINT: 0.5 + NOISE}, "* * no holds"),
        ({ALL_HEADS: [5, 8, 16], W: [3, 4, 8]}, {}, "* no construction *"),
        ({ALL_HEADS: [5, 9, 16]}, {}, "* * holds *"),
    ],
)
def test_verdicts(claims, spectra, costs, verdicts):
    _, found = claims(spectra, costs)
    short = {"contradicted": "no", "by construction": "construction"}
    for one, expected in zip(found, verdicts.split(), strict=True):
        assert expected in ("*", short.get(one, one))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "together", "each"),
    [
        (workdirs.grouped(2, 2), 16, 8),  # K H
        (workdirs.grouped(2, 1, 3), 8 + 2 * 3, 8),  # J H + K R
        (workdirs.factored(2, 1, 5), 5, 5),  # J R
        (workdirs.mla(), 10 + 4, 8 + 4),  # C + P
    ],
)
def test_rank_of_weights_is_the_mechanisms(mechanism, together, each):
    model = models.model("nanochat", mechanism, num_layers=1)
    heads = heads_lib.of_layer(model, 0)
    layer = next(activations.layers(model, TEXTS["one"][None, :16]))
    found = measurements._spectra(heads, layer, 1, joint=True)
    channels = mechanism.query_dim
    assert found[ALL_HEADS][0, 0, 1:].tolist() == [together, mechanism.key_heads * channels]
    assert (found[W][..., 1] == each).all() and (found[W][..., 2] == channels).all()
    assert (found[measurements.SPECTRUM_KEYS][..., 1:] == channels).all()


def test_perplexity_of_gpt2_is_drawn_for_heads_of_its_width(measured):
    """Draws it before RoPE, which GPT-2 lacks."""
    line = "; GPT-2, SVD of all heads (thin keys): 2.303 at 10.6667, 1.257 at 16, 1.104 at 21.3333,"
    wide = Results("m", REQUEST, dataclasses.replace(measured, key_dim=64))
    assert line in report._perplexity(wide, BEFORE).alternative
    for of, where in ((wide, AFTER), (Results("m", REQUEST, measured), BEFORE)):
        assert "GPT-2" not in report._perplexity(of, where).alternative


@pytest.mark.slow
def test_one_short_text_and_one_kv_head():
    """Has no fixed subspace and no joint SVD."""
    request = Request(dict(one=SHORT["one"]), (16,))
    found = report.section(models.model("nanochat", workdirs.grouped(1, 1)), request)
    models.check_section(found)
    assert found.tables[0].rows[3][2:] == ["no text for a fixed subspace", "not measured"]
    names = {row["way"] for row in found.data["ways"]}
    assert names == {subspace_methods.WEIGHTS, CONTEXT, subspace_methods.FIRST_HALF}
    assert "fixed" not in [row[1] for row in found.tables[4].rows]


@pytest.mark.slow
def test_models_without_rope_and_mask():
    """Layers have one KV head or several; keys are cut at one place."""
    layers = [workdirs.grouped(K, K, qk_norm="none", bias=True) for K in (1, 4)]
    model = models.model("gpt2", layers, causal=False)
    found = report.section(model, Request(SHORT, (16,)))
    models.check_section(found)
    ways = {(row["way"], row["where"]) for row in found.data["ways"]}
    assert {where for _, where in ways} == {subspace_methods.ANYWHERE}
    assert len(ways) == 6 and len(found.figures) == 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(position_channels=4), "position_channels = 4"),
        (dict(alibi=True), "^alibi = True: part of each key encodes its position"),
        (dict(num_bases=1, rank=3, qk_norm="rms_gain", rope="shared"), "not linear"),
        (dict(key_dim=1), "keys of one channel"),
    ],
)
def test_keys_without_a_rank_are_refused(keys, message):
    mechanism = dataclasses.replace(workdirs.grouped(2, 2, qk_norm="none"), **keys)
    block = "gpt2" if "key_dim" in keys else "llama"
    positions = dict(positions="none") if "alibi" in keys else {}
    with pytest.raises(UserError, match=message):
        report.check(models.model(block, mechanism, **positions), REQUEST)


def test_short_rows_are_refused(model):
    report.check(model, REQUEST)
    with pytest.raises(UserError, match="lengths = 15: .* at least 16 tokens"):
        report.check(model, Request(TEXTS, (4, 15)))


@pytest.mark.slow
def test_losses_that_are_not_finite_are_refused():
    model = models.model()
    model.weights["final_norm", "gain"][:] = np.nan
    with pytest.raises(UserError, match="losses of made on the text are not finite"):
        report.section(model, Request(dict(one=SHORT["one"]), (16,)))


def test_report_is_as_before(model, measured, monkeypatch):
    """Compares with a file; rows have the long enough length nearest to the paper's."""
    models.check_section(report._section(Results("made", REQUEST, measured)))
    texts = {name: np.zeros(5000, np.int32) for name in TEXTS}
    expected_lengths = {(15, 5000): (5000, 5000), LENGTHS: (40, 40), (16, 5000): (16, 5000)}
    calls = []
    monkeypatch.setattr(measurements, "measure", lambda *given: (calls.append(given), measured)[1])
    golden.note_drawings(monkeypatch)
    for lengths in expected_lengths:
        golden.check(report.section(model, Request(texts, lengths)))
    assert calls == [(model, texts, *lengths) for lengths in expected_lengths.values()]
