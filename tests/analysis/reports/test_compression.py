"""The report on fixed subspaces of keys: its numbers against those of the functions."""

import dataclasses
import functools
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
import threadpoolctl

from kvjax.analysis.measures import (
    activations,
    cut_keys,
    heads as heads_lib,
    key_drift,
    key_subspaces,
    spectrum,
    subspace_methods,
)
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.measures.cut_keys import Cut
from kvjax.analysis.measures.subspace_methods import AFTER, BEFORE
from kvjax.analysis.page import document
from kvjax.analysis.reports.compression import measurements, report as report, tables
from kvjax.analysis.reports.compression.results import Results
from kvjax.analysis.request import Request
from kvjax.foundation.errors import UserError
from kvjax.layers import rope as rope_lib
from tests import golden
from tests.convert import workdirs

LENGTHS = (16, 40)
TEXTS = {
    name: np.random.default_rng(seed).integers(0, 256, 200).astype(np.int32)
    for seed, name in enumerate(("one", "two"))
}
REQUEST = Request(TEXTS, LENGTHS)
SHORT = {name: tokens_T[:16] for name, tokens_T in TEXTS.items()}


def _model(block="llama", mechanism=None, *, num_layers=1, **keys):
    block = dataclasses.replace(workdirs.BLOCKS[block], num_layers=num_layers, **keys)
    mechanism = mechanism or workdirs.grouped(2, 2, qk_norm="none")
    return workdirs.Made(workdirs.config(block, mechanism))


@pytest.fixture(scope="module")
def model():
    return _model(window=9, num_layers=2)


@pytest.fixture(scope="module")
def measured(model):
    return measurements.measure(model, TEXTS, 16, 40)


@pytest.fixture(scope="module")
def section(measured):
    return report._section(Results("made", REQUEST, measured))


# -- which tokens ----------------------------------------------------------------------------------


def test_fixed_subspaces_see_no_token_that_is_measured():
    tokens = {name: np.arange(200) + 1000 * i for i, name in enumerate("ab")}
    read = subspace_methods.windows(tokens, 14, 32)
    assert read.measured_BT.tolist() == [
        list(range(first, first + 15)) for first in (0, 15, 1000, 1015)
    ]
    assert read.texts_B.tolist() == [0, 0, 1, 1] and read.texts_C.tolist() == [0] * 4 + [1] * 4
    assert (read.fixed_CT % 1000).min() >= 32  # drift is measured up to there
    assert read.fixed_CT[:4, 0].tolist() == [32, 74, 116, 158]  # evenly over 12 that there are
    assert read.rows().shape == (4 + 8, 14) and read.later
    assert read.pools(0) == {
        subspace_methods.CALIBRATED: tuple(range(4, 12)),
        subspace_methods.OTHERS: tuple(range(8, 12)),
    }
    assert read.pools(3)[subspace_methods.OTHERS] == tuple(range(4, 8))


def test_short_texts_have_fixed_subspaces_of_each_other():
    """And one alone has none; rows have a token less where there is none to predict."""
    tokens = {name: np.arange(32) + 1000 * i for i, name in enumerate("ab")}
    read = subspace_methods.windows(tokens, 32, 32)
    assert read.length == 31 and not read.later
    np.testing.assert_array_equal(read.fixed_CT, read.measured_BT[:, :-1])
    assert read.pools(0) == {subspace_methods.CALIBRATED: (3,)}
    assert subspace_methods.windows(dict(a=tokens["a"]), 15, 32).pools(0) == {}
    assert (
        len(subspace_methods.windows(tokens, 16, 32).measured_BT) == 2
    )  # not one row more than fits


def test_ranks_differ():
    def ranks(H):
        return [subspace_methods.rank(share, H) for share in subspace_methods.shares(H)]

    assert ranks(64) == [8, 16, 32, 48]
    assert ranks(8) == [1, 2, 4, 6]
    assert ranks(4) == [1, 2, 3]
    assert ranks(2) == [1] and subspace_methods.shares(2) == (0.5,)


# -- what is measured ------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_and_spectra(model, measured):
    """Against the subspaces made one by one."""
    read = subspace_methods.windows(TEXTS, 16, 40)
    layers = zip(heads_lib.layers(model), activations.layers(model, read.rows()), strict=True)
    for i, (heads, layer) in enumerate(layers):
        rope, at = key_subspaces.rope_of(heads), slice(4 * i, 4 * i + 4)
        weights = key_subspaces.of_weights(heads.key_DKH, np.zeros((2, 8)))
        joint = key_subspaces.of_weights(heads.key_DKH, np.zeros((2, 8)), together=True)
        for b in range(4):
            of = functools.partial(subspace_methods.of_rows, layer, rope)
            others = range(8, 12) if b < 2 else range(4, 8)
            expected = {
                (subspace_methods.WEIGHTS, BEFORE): (weights, 4),
                (subspace_methods.JOINT, BEFORE): (joint, 8),
            }
            for where in (BEFORE, AFTER):
                expected |= {
                    (subspace_methods.CALIBRATED, where): (of(where, range(4, 12)), 4),
                    (subspace_methods.OTHERS, where): (of(where, others), 4),
                    (subspace_methods.CONTEXT, where): (of(where, [b]), 4),
                    (subspace_methods.FIRST_HALF, where): (of(where, [b], slice(8)), 4),
                }
            mean = expected[subspace_methods.CALIBRATED, BEFORE][0].center_JC
            expected[subspace_methods.WEIGHTS_MEAN, BEFORE] = (weights._replace(center_JC=mean), 4)
            assert set(expected) == set(measured.errors)
            for way, (subspaces, r) in expected.items():
                if way[1] == BEFORE:
                    cut = key_subspaces.rotate_by_position(
                        subspaces.cut(layer.plain_key_BTKH[b], r), rope
                    )
                else:
                    cut = subspaces.cut(layer.key_BTKH[b], r)
                errors = key_subspaces.errors(layer, b, [cut], slice(8, None))
                found = measured.errors[way][b, at, 2]
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
    """Each cut where it is found, at its rank; losses are of the second halves."""
    read = subspace_methods.windows(TEXTS, 16, 40)
    both = {(subspace_methods.CONTEXT, AFTER): 4, (subspace_methods.JOINT, BEFORE): 8}
    runs = cut_keys.Runs(model, read.measured_BT[:, :-1], list(both))
    layers = zip(heads_lib.layers(model), activations.layers(model, read.rows()), strict=True)
    for i, (heads, layer) in enumerate(layers):
        ways = subspace_methods.of_layer(heads, layer, read, rotates=True, joint=True)
        cuts = {way: Cut(ways[way], r, after_rope=way[1] == AFTER) for way, r in both.items()}
        runs.layer(i, cuts, heads.rotated)
    for way, nats_BT in runs.losses(read.measured_BT[:, 9:]).items():
        np.testing.assert_allclose(measured.nats[way, 1 / 2], nats_BT, atol=1e-4)
        assert np.abs(nats_BT - measured.nats[None]).max() > 1e-3


def test_fixed_subspaces_of_each_text():
    """Drift takes one subspace for each text, that of its first row."""
    read = subspace_methods.windows({name: np.arange(32) for name in "ab"}, 15, 32)
    one, other = (
        key_subspaces.Subspaces(np.zeros((1, 4)), np.eye(4)[None], i * np.eye(4)[None])
        for i in (1, 2)
    )
    ways = {(subspace_methods.CALIBRATED, AFTER): [one, one, other, other]}
    ways[subspace_methods.CONTEXT, BEFORE] = [one] * 4
    found = measurements._fixed(ways, read)
    assert [each.write_JRC[0, 0, 0] for each in found[AFTER]] == [1, 2]
    assert found[BEFORE] == [None, None]


def test_queries_weigh_as_keys_meet_them(model):
    """Before RoPE turned by how far they are from keys, rows together; after it each row alone."""
    layer = next(activations.layers(model, np.stack([t[:20] for t in TEXTS.values()])))
    rope = key_subspaces.rope_of(heads_lib.of_layer(model, 0))

    def of(x_BTNH):
        return x_BTNH[:, 3:12].astype(np.float64)

    moment_KHH = key_subspaces.moments(of(layer.plain_query_BTNH), 2)
    turned_KHH = key_subspaces.rotated_moments(moment_KHH, rope, Mask(window=9), 9)
    after_KHH = key_subspaces.moments(of(layer.query_BTNH), 2)
    plain_BTKH, key_BTKH = of(layer.plain_key_BTKH), of(layer.key_BTKH)
    expected = {
        BEFORE: key_subspaces.of_text(turned_KHH, plain_BTKH, each_row=False),
        AFTER: key_subspaces.of_text(after_KHH, key_BTKH, each_row=True),
    }
    for where, one in expected.items():
        found = subspace_methods.of_rows(layer, rope, where, [0, 1], slice(3, 12))
        np.testing.assert_allclose(found.projectors(3), one.projectors(3), rtol=1e-9)
    still = key_subspaces.of_text(moment_KHH, plain_BTKH, each_row=False)
    assert np.abs(still.projectors(3) - expected[BEFORE].projectors(3)).max() > 1e-2


@pytest.mark.slow
def test_drift(model, measured):
    """Drift on the longest rows; the last two errors are those of all tokens and of other text."""
    assert measured.drift_at == (5, 10, 20) and measured.drift_rank == 2
    rows_BT = np.stack([tokens_T[:40] for tokens_T in TEXTS.values()])
    read = subspace_methods.windows(TEXTS, 16, 40)
    other = list(activations.layers(model, read.rows()))
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


def test_places_that_are_spread():
    assert key_drift.evenly_spaced(4, 16).tolist() == [2, 6, 10, 14]
    for t in (5, 16, 31):
        places = key_drift.evenly_spaced(t, 31)
        assert len(set(places.tolist())) == t and set(np.diff(places)) <= {31 // t, -(-31 // t)}


def test_subspaces_are_of_no_rank_that_tokens_do_not_tell():
    """Twice as many tokens at least, for drift and for the first half."""
    for channels, length in ((64, 1024), (64, 64), (128, 64), (8, 40), (64, 16), (4, 17)):
        r = key_drift.rank(channels, length)
        at = key_drift.prefix_lengths(length, r)
        assert at and min(at) >= 2 * r and max(at) == length // 2 and r <= channels / 4
    assert key_drift.rank(64, 1024) == 16 and key_drift.prefix_lengths(1024, 16) == (
        32,
        64,
        128,
        256,
        512,
    )
    read = subspace_methods.windows({name: np.arange(64) for name in "ab"}, 31, 64)
    half = [r for r in range(1, 33) if read.enough_tokens((subspace_methods.FIRST_HALF, AFTER), r)]
    assert read.length == 31 and max(half) == 7
    assert (
        max(r for r in range(99) if read.enough_tokens((subspace_methods.CALIBRATED, AFTER), r))
        == 31
    )
    assert read.enough_tokens((subspace_methods.CONTEXT, AFTER), 31)


BIASES = dict(qk_norm="none", bias=True)
MECHANISMS = {
    "mqa": ("nanochat", workdirs.grouped(1, 1)),
    "rope shared": ("nanochat", workdirs.grouped(4, 1, 3, rope="shared")),
    "mla": ("nanochat", workdirs.mla()),
    "biases": ("llama", workdirs.grouped(2, 2, **BIASES)),
    "by layer": ("nanochat", [workdirs.grouped(4, 2, 3), workdirs.factored(2, 1, 5, 4)]),
    "no RoPE": ("gpt2", [workdirs.grouped(K, K, **BIASES) for K in (1, 4)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope shared", "mla", "biases", "by layer"])
def test_runs_with_all_channels_are_the_model(name):
    """Whatever the mechanism; with fewer channels another one."""
    model = _model(*MECHANISMS[name], num_layers=2 if name == "by layer" else 1)
    count = 5 if name == "biases" else 2  # rows of two parts
    rows_BT = np.random.default_rng(3).integers(0, 256, (count, 13)).astype(np.int32)
    runs = cut_keys.Runs(model, rows_BT[:, :-1], [None, "before", "after", "fewer"])
    layers = zip(heads_lib.layers(model), activations.layers(model, rows_BT[:, :-1]), strict=True)
    first = subspace_methods.places(rotates=model.transformer.block.angles_base is not None)[0]
    for i, (heads, layer) in enumerate(layers):
        rope, H = key_subspaces.rope_of(heads), layer.key_BTKH.shape[-1]
        before, after = (
            [subspace_methods.of_rows(layer, rope, where, [b]) for b in range(count)]
            for where in (first, AFTER)
        )
        cuts = dict(before=Cut(before, H, after_rope=False), after=Cut(after, H, after_rope=True))
        runs.layer(i, cuts | dict(fewer=Cut(before, 2, after_rope=False)), heads.rotated)
    expected = activations.losses(model, rows_BT)
    found = runs.losses(rows_BT[:, 1:][:, 5:])
    for one in (None, "before", "after"):
        np.testing.assert_allclose(found[one], expected[:, 5:], atol=2e-3)
    assert np.abs(found["fewer"] - expected[:, 5:]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_runs_are_those_of_keys_cut_one_by_one(turned):
    """Each row by its own subspaces, before RoPE or after it: outputs of attention against those
    of cut keys in numpy. The rest of the block is the same."""
    model = _model(num_layers=1, window=0)
    rows_BT = np.random.default_rng(3).integers(0, 256, (5, 12)).astype(np.int32)
    heads, layer = heads_lib.of_layer(model, 0), next(activations.layers(model, rows_BT))
    rope, where = key_subspaces.rope_of(heads), AFTER if turned else BEFORE
    of_rows = [subspace_methods.of_rows(layer, rope, where, [b]) for b in range(5)]
    model.weights["segments", 0, "mlp", "down"][:] = 0
    runs = cut_keys.Runs(model, rows_BT, [None, "cut"])
    begun = np.concatenate(runs._x[None])
    runs.layer(0, dict(cut=Cut(of_rows, 3, after_rope=turned)), heads.rotated)
    for b in (0, 4):
        key_TKH = subspace_methods.cut_keys(layer, rope, b, where, of_rows[b], 3)
        cut = layer._replace(key_BTKH=key_TKH[None], query_BTNH=layer.query_BTNH[b : b + 1])
        cut = cut._replace(value_BTKH=layer.value_BTKH[b : b + 1])
        expected_TD = np.tensordot(activations.attention(cut, 0)[1], heads.out_NHD, 2)
        added_TD = np.concatenate(runs._x["cut"])[b] - begun[b]
        np.testing.assert_allclose(added_TD, expected_TD, atol=1e-4 * np.abs(expected_TD).max())


# -- what is said ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_numbers_of_the_report(model, measured, section):
    """Medians over heads and rows, and perplexity with how sure it is."""
    rows = {(row["way"], row["where"], row["rank"]): row for row in section.data["ways"]}
    assert len(rows) == 11 * 4 - 2  # half of 16 tokens does not tell rank 6
    ran = {key for key, row in rows.items() if row["perplexity"]}
    few = {(name, where, r) for name, where, r in rows if r in (2, 4)}
    few = {key for key in few if key[1] == AFTER or key[0] == subspace_methods.FIRST_HALF}
    assert few - ran == {(subspace_methods.OTHERS, AFTER, r) for r in (2, 4)}
    assert {
        key for key in ran if key[1] == AFTER or key[0] == subspace_methods.FIRST_HALF
    } == few & ran
    assert len(ran) == 4 * 4 + 2 + 3 * 2
    row = rows[subspace_methods.FIRST_HALF, AFTER, 2]
    errors = measured.errors[subspace_methods.FIRST_HALF, AFTER][:, :, 1]
    assert row["logit"]["median"] == np.median(errors[..., 0])
    assert row["output"]["high"] == np.quantile(errors[..., 1], 0.75)
    between = np.std([np.median(errors[:2, :, 0]), np.median(errors[2:, :, 0])])
    assert row["logit"]["between_texts"] == pytest.approx(between)
    nats_BT = measured.nats[
        (subspace_methods.FIRST_HALF, AFTER), 1 / 4
    ]  # [4, 8]: the second halves
    more = (nats_BT - measured.nats[None]).astype(np.float64)
    found = row["perplexity"]
    assert found["times"] == pytest.approx(math.exp(more.mean()), rel=1e-5)
    low = more.mean() - 1.96 * more.std() / math.sqrt(32)
    assert found["low"] == pytest.approx(math.exp(low), rel=1e-5)
    assert found["by_text"]["two"] == pytest.approx(math.exp(nats_BT[2:].mean()), rel=1e-5)
    assert rows[subspace_methods.OTHERS, AFTER, 2]["perplexity"] is None
    rows_BT = np.concatenate([tokens_T[:34].reshape(2, 17) for tokens_T in TEXTS.values()])
    expected = activations.losses(model, rows_BT)[:, 8:].mean()
    assert section.data["perplexity"]["all"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_report_is_a_page_and_json(section):
    json.dumps(section.data, allow_nan=False)
    assert document.page("t", "", [section], {}).count("<svg") == len(section.figures) == 6
    assert len(section.tables) == 5
    for figure in section.figures:
        assert re.search(r"\d", figure.alternative) and figure.text.paper
    for table in section.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
        table.shown()
    _, spectra, ways, by_text, drift = section.tables
    assert [row for row in spectra.rows if row[0].startswith("GPT-2")][1][3:6] == [64, 64, 2]
    published = [row for row in ways.rows if "GPT-2" in row[0]]
    assert published[3][2:4] == [32, 50.0] and published[3][8] == pytest.approx(1.02, abs=1e-3)
    assert [row[3] for row in published] == pytest.approx([50 / 3, 25, 100 / 3, 50, 200 / 3])
    assert by_text.rows[0][0] == "the model" and drift.rows[-1][1] == "fixed"


@pytest.mark.slow
def test_data_has_every_head(measured, section):
    drift, spectra = section.data["drift"]["by_place"][AFTER], section.data["spectra"]
    assert spectra[W]["of_heads"] == measured.spectra[W][..., 0].tolist()
    assert drift["overlap_of_heads"] == measured.overlap[AFTER].tolist()
    assert drift["later_error_of_heads"] == measured.drift_error[AFTER].tolist()
    gap_BKT = measured.overlap[AFTER][..., 1] - measured.overlap[AFTER][..., 0]
    said = [one["median"] for one in drift["drift_of_overlap"]]
    assert said == np.median(gap_BKT, axis=(0, 1)).tolist()
    assert section.tables[4].rows[-3][10] == said[-1]
    half = section.data["errors_of_heads"][f"{subspace_methods.FIRST_HALF}, {AFTER}"]
    assert half[0][0][3] == [None, None] and half[0][0][2][0] > 0


@pytest.mark.slow
def test_what_is_shown_says_after(section):
    """Behind sounds as if it were a place; and errors are of so many queries as there are."""
    shown = document.page("t", "", [section], {})
    assert not re.search("behind", shown, re.IGNORECASE) and "keys cut after RoPE" in shown
    assert "8 queries each" in shown and "other text would have told" not in shown
    assert "the first, the second and the third" not in shown
    assert f"LRKV speaks of {W}, thin keys cuts {ALL_HEADS}" in shown
    assert "the gap between the two lines is the drift" in shown


def test_rows_with_the_same_subspaces_share_their_projectors(monkeypatch):
    """And BLAS has one thread meanwhile."""
    made, threads = [], []

    def projectors(of, rank):
        made.append(of)
        threads.append(
            {
                pool["num_threads"]
                for pool in threadpoolctl.threadpool_info()
                if pool["user_api"] == "blas"
            }
        )
        return np.tile(of.write_JRC[0, 0, 0] * np.eye(4), (1, 1, 1))

    one, other = (
        key_subspaces.Subspaces(np.zeros((1, 4)), np.eye(4)[None], i * np.eye(4)[None])
        for i in (1, 2)
    )
    monkeypatch.setattr(key_subspaces.Subspaces, "projectors", projectors)
    centers, found = cut_keys._arrays(Cut([one, one, other, one], 4, after_rope=False))
    assert [id(of) for of in made] == [id(one), id(other)] and set().union(*threads) == {1}
    assert found[:, 0, 0, 0].tolist() == [1, 1, 2, 1] and centers.shape == (4, 1, 4)


def test_keys_that_nothing_turns_stay():
    """Without RoPE, and where it turns no channel; others turn as `rope.rotate` says."""
    key_BTKH = np.random.default_rng(0).normal(size=(1, 3, 2, 6)).astype(np.float32)
    rotary = rope_lib.rotary(np.arange(3)[None], 4, 100.0)
    assert cut_keys._rotate(key_BTKH, (1, 5), None) is key_BTKH
    assert cut_keys._rotate(key_BTKH, (3, 3), rotary) is key_BTKH
    found = cut_keys._rotate(jnp.asarray(key_BTKH), (1, 5), rotary)
    np.testing.assert_array_equal(found[..., 1:5], rope_lib.rotate(key_BTKH[..., 1:5], rotary))
    np.testing.assert_array_equal(found[..., [0, 5]], key_BTKH[..., [0, 5]])


def _results(made, spectra, nats, texts=TEXTS):
    """With other spectra, and ways (by name) that cost so many nats, of each token or of all."""
    spectra = made.spectra | {name: np.array([[of]]) for name, of in spectra.items()}
    nats = {name: made.nats[None] + nats.get(name and name[0][0], 0.0) for name in made.nats}
    found = dataclasses.replace(made, spectra=spectra, nats=nats)
    return Results("m", Request(texts, LENGTHS), found)


M, W = measurements.SPECTRUM_INTERACTION, measurements.SPECTRUM_WEIGHTS
ALL_HEADS, FIXED, JOINT = (
    measurements.SPECTRUM_JOINT,
    subspace_methods.CALIBRATED,
    subspace_methods.JOINT,
)


@pytest.fixture
def claims(measured):
    """A function of other numbers: the claims' measurements and verdicts."""

    def of(*numbers):
        rows = tables.tables(_results(measured, *numbers))[0].rows
        return [row[2] for row in rows], [row[3] for row in rows]

    return of


def test_verdicts_are_those_of_the_numbers(claims):
    """Both ways of each of the four."""
    here, verdicts = claims({M: [6, 8, 8], W: [3, 8, 8]}, {FIXED: 0.01, JOINT: 0.02})
    assert here[:3] == ["6 of 8 components", "3 of 8 components", "+2.0 % (+2.0 to +2.0)"]
    assert here[3].startswith("fixed +1.0 % (+1.0 to +1.0), of the context +0.0 %")
    assert verdicts == ["holds", "holds", "holds", "contradicted"]
    _, verdicts = claims({M: [4, 8, 8], W: [5, 8, 8]}, {FIXED: 0.3, JOINT: 0.3})
    assert verdicts == ["contradicted", "contradicted", "contradicted", "holds"]


def test_a_fixed_subspace_is_compared_with_that_of_the_context(claims):
    here, verdicts = claims({}, {FIXED: 0.3, subspace_methods.CONTEXT: 0.29})
    assert verdicts[3] == "contradicted" and here[3].endswith("ratio +1.0 % (+1.0 to +1.0)")
    assert claims({}, {FIXED: 0.3, subspace_methods.CONTEXT: 0.1})[1][3] == "holds"
    # Both are little, and differ by 8 %.
    assert claims({}, {FIXED: 0.04, subspace_methods.CONTEXT: -0.04})[1][3] == "holds"


def test_an_interval_around_the_limit_is_undecided(claims):
    around = np.random.default_rng(0).normal(size=(4, 8))
    _, verdicts = claims({}, {FIXED: 0.06 + 0.3 * around, JOINT: 0.04 + 0.3 * around})
    assert verdicts[2:] == ["undecided", "undecided"]
    _, verdicts = claims({}, {FIXED: 0.5 + 0.3 * around, JOINT: 0.5 + 0.3 * around})
    assert verdicts[2:] == ["contradicted", "holds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "together", "each"),
    [
        (workdirs.grouped(2, 2), 16, 8),
        (workdirs.grouped(2, 1, 3), 8 + 2 * 3, 8),
        (workdirs.factored(2, 1, 5), 5, 5),
        (workdirs.mla(), 10 + 4, 8 + 4),
    ],
)
def test_the_rank_that_weights_can_have(mechanism, together, each):
    """It is their mechanism's: K H, J H + K R, J R and C + P."""
    model = _model("nanochat", mechanism, num_layers=1)
    heads = heads_lib.of_layer(model, 0)
    layer = next(activations.layers(model, TEXTS["one"][None, :16]))
    found = measurements._spectra(heads, layer, 1, joint=True)
    channels = mechanism.query_dim
    assert found[ALL_HEADS][0, 0, 1:].tolist() == [
        together,
        mechanism.key_heads * channels,
    ]
    assert (found[W][..., 1] == each).all() and (found[W][..., 2] == channels).all()
    assert (found[measurements.SPECTRUM_KEYS][..., 1:] == channels).all()


def test_low_rank_by_construction(claims):
    """At most half of the channels."""
    here, verdicts = claims({ALL_HEADS: [5, 8, 16], W: [3, 4, 8]}, {})
    assert here[1] == "3 of 4 components (rank 4 of 8 by construction)"
    assert verdicts[1:3] == ["contradicted", "by construction"]
    assert claims({ALL_HEADS: [5, 9, 16]}, {})[1][2] == "holds"


def test_gpt2_beside_heads_of_its_width_and_no_other_text(measured):
    """Before RoPE, as GPT-2 has none."""
    line = "; GPT-2, SVD of all heads (thin keys): 2.303 at 10.7, 1.257 at 16, 1.104 at 21.3, "
    line += "1.020 at 32, 1.013 at 42.7."
    wide = Results("m", REQUEST, dataclasses.replace(measured, key_dim=64))
    assert report._perplexity(wide, BEFORE).alternative.endswith(line)
    for of, where in ((wide, AFTER), (Results("m", REQUEST, measured), BEFORE)):
        assert "GPT-2" not in report._perplexity(of, where).alternative
    nats = {of: x for of, x in measured.nats.items() if of is None or of[0][0] != FIXED}
    found = Results("m", REQUEST, dataclasses.replace(measured, nats=nats, later=False))
    assert tables.tables(found)[0].rows[3][2:] == ["no text for a fixed subspace", "not measured"]


@pytest.mark.slow
def test_one_short_text_and_one_head_of_keys():
    """There is no fixed subspace, and MQA has no other head to share an SVD with."""
    request = Request(dict(one=SHORT["one"]), (16,))
    found = report.section(_model(*MECHANISMS["mqa"]), request)
    json.dumps(found.data, allow_nan=False)
    assert found.tables[0].rows[3][3] == "not measured"
    names = {row["way"] for row in found.data["ways"]}
    assert names == {
        subspace_methods.WEIGHTS,
        subspace_methods.CONTEXT,
        subspace_methods.FIRST_HALF,
    }
    assert "fixed" not in [row[1] for row in found.tables[4].rows]
    assert subspace_methods.JOINT not in found.lead


@pytest.mark.slow
def test_models_without_rope_that_see_all_tokens():
    """There is one place; and layers may have one head of keys or several."""
    model = _model(*MECHANISMS["no RoPE"], num_layers=2, causal=False)
    found = report.section(model, Request(SHORT, (16,)))
    json.dumps(found.data, allow_nan=False)
    ways = {(row["way"], row["where"]) for row in found.data["ways"]}
    assert {where for _, where in ways} == {subspace_methods.ANYWHERE}
    assert len(ways) == 6 and len(found.figures) == 4 and "after RoPE" not in found.lead


def test_bad_input(model):
    with pytest.raises(UserError, match="lengths = 15: .* at least 16 tokens"):
        report.check(model, Request(TEXTS, (4, 15)))
    sinusoids = workdirs.grouped(2, 2, qk_norm="none", position_channels=4)
    with pytest.raises(UserError, match="position_channels = 4"):
        report.check(_model(mechanism=sinusoids), REQUEST)
    slopes = workdirs.grouped(2, 2, qk_norm="none", alibi=True)
    with pytest.raises(UserError, match="^alibi = True: part of each key is its position"):
        report.check(_model("llama", slopes, positions="none"), REQUEST)
    split = workdirs.grouped(4, 1, 3, qk_norm="rms_gain", rope="shared")
    with pytest.raises(UserError, match="not linear"):
        report.check(_model(mechanism=split), REQUEST)
    narrow = workdirs.grouped(2, 2, qk_norm="none", key_dim=1)
    with pytest.raises(UserError, match="keys of one channel"):
        report.check(_model("gpt2", narrow), REQUEST)
    report.check(model, REQUEST)


@pytest.mark.slow
def test_a_text_that_is_shorter_than_a_length(model):
    short = TEXTS | dict(two=np.zeros(20, np.int32))
    with pytest.raises(UserError, match="text 'two' has 20 tokens, fewer than the length 40"):
        report.section(model, Request(short, LENGTHS))


@pytest.mark.slow
def test_what_is_not_finite_is_named():
    model = _model()
    model.weights[("embedding",)][TEXTS["one"][3]] = np.inf
    with pytest.raises(UserError, match="layer 0 of made: queries on the text are not finite"):
        report.section(model, REQUEST)
    model = _model()
    model.weights["final_norm", "gain"][:] = np.nan
    with pytest.raises(UserError, match="losses of made on the text are not finite"):
        report.section(model, Request(dict(one=SHORT["one"]), (16,)))


def test_all_that_it_says(model, measured, monkeypatch):
    """Rows have the length nearest to the paper's of those that are long enough."""
    texts = {name: np.zeros(5000, np.int32) for name in TEXTS}
    of = {(15, 5000): (5000, 5000), LENGTHS: (40, 40), (16, 5000): (16, 5000)}
    asked = []
    monkeypatch.setattr(measurements, "measure", lambda *given: (asked.append(given), measured)[1])
    golden.note_drawings(monkeypatch)
    for lengths in of:
        golden.check(report.section(model, Request(texts, lengths)))
    assert asked == [(model, texts, *lengths) for lengths in of.values()]
