"""The report on what heads do: its numbers against those of the functions, and what it says."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from kvjax.analysis.measures import activations, cka, diversity, heads as heads_lib, patterns
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.page import document
from kvjax.analysis.reports.behaviour import measurements, report as report
from kvjax.analysis.reports.behaviour.results import DISTANCES, Results
from kvjax.analysis.request import Request
from kvjax.foundation.errors import UserError
from tests import golden
from tests.convert import workdirs

LENGTH = 20
TEXTS = {
    name: np.random.default_rng(seed).integers(0, 256, 50).astype(np.int32)
    for seed, name in enumerate(("one", "two"))
}
REQUEST = Request(TEXTS, (6, LENGTH))
SHORT = {"one": TEXTS["one"][:16]}


def _model(block="llama", mechanism=None, *, num_layers=2, **keys):
    block = dataclasses.replace(workdirs.BLOCKS[block], num_layers=num_layers, **keys)
    mechanism = mechanism or workdirs.grouped(2, 2, qk_norm="none")
    return workdirs.Made(workdirs.config(block, mechanism))


@pytest.fixture(scope="module")
def model():
    return _model(window=9)


@pytest.fixture(scope="module")
def measured(model):
    return measurements.measure(model, TEXTS, LENGTH, seed=0)


@pytest.fixture(scope="module")
def section(measured):
    return report._section(Results("made", measured))


# -- what is measured ------------------------------------------------------------------------------


def test_numbers_are_those_of_the_functions(model, measured):
    """Means over the first two windows of each text."""
    assert (measured.sequences, measured.length, measured.mask) == (4, LENGTH, Mask(window=9))
    rows_BT = np.concatenate([tokens_T[: 2 * LENGTH].reshape(2, -1) for tokens_T in TEXTS.values()])
    visible_TT = Mask(window=9).visible(LENGTH)
    for i, layer in enumerate(activations.layers(model, rows_BT)):
        found = measured.layers[i]
        both = [activations.attention(layer, b) for b in range(4)]
        p_BNTT, o_BTNH = (np.stack(x) for x in zip(*both, strict=True))
        for name in patterns.Statistics._fields:
            expected_BN = [getattr(patterns.statistics(p, visible_TT), name) for p in p_BNTT]
            np.testing.assert_allclose(found.statistics[name], np.mean(expected_BN, axis=0))
        apart = [  # each window with one of the other text
            patterns.divergence(p_BNTT[b], p_BNTT[(b + 2) % 4], visible_TT) for b in range(4)
        ]
        np.testing.assert_allclose(found.statistics["content_N"], np.mean(apart, axis=0))
        between = [patterns.divergences(p, visible_TT) for p in p_BNTT]
        np.testing.assert_allclose(found.divergence_NN, np.mean(between, axis=0))
        behind = [patterns.divergences(*patterns.without_first(p, visible_TT)) for p in p_BNTT]
        np.testing.assert_allclose(found.without_first_NN, np.mean(behind, axis=0))
        flat_NTH = o_BTNH.reshape(-1, *o_BTNH.shape[2:]).swapaxes(0, 1)
        np.testing.assert_allclose(found.outputs_NN, cka.linear_cka(list(flat_NTH)), atol=1e-9)
        np.testing.assert_allclose(found.text_NTT, p_BNTT[0], rtol=1e-6)
        expected_NN = diversity.of_layer(heads_lib.of_layer(model, i)).similarity_NN
        np.testing.assert_array_equal(found.weights_NN, expected_NN)


def test_layers_are_compared_on_the_same_tokens(model, measured):
    rows_BT = np.concatenate([tokens_T[: 2 * LENGTH].reshape(2, -1) for tokens_T in TEXTS.values()])
    layers = list(activations.layers(model, rows_BT))

    def flat(x):
        return x.reshape(4 * LENGTH, -1)

    expected_LL = cka.linear_cka([flat(layer.input_BTD) for layer in layers])
    np.testing.assert_allclose(measured.inputs_LL, expected_LL, atol=1e-6)
    outputs = [np.stack([activations.attention(layer, b)[1] for b in range(4)]) for layer in layers]
    np.testing.assert_allclose(measured.outputs_LL, cka.linear_cka(list(map(flat, outputs))), 1e-5)


def test_repeated_tokens(model, measured):
    """Tokens of the texts, in a block that fits the window."""
    assert measured.block == 9
    tokens_A = np.unique(np.concatenate(list(TEXTS.values())))
    again_BT = patterns.repeated(tokens_A, 9, 8, seed=0)
    layer = next(activations.layers(model, again_BT))
    found = [patterns.induction(activations.attention(layer, b)[0], 9) for b in range(8)]
    np.testing.assert_allclose(
        measured.layers[0].statistics["induction_N"], np.mean(found, axis=0), rtol=1e-6
    )
    assert measured.induction_by_chance == pytest.approx(1 / 9)


def test_relation_of_weights_and_behaviour(measured):
    """Spearman's over the pairs of a layer; the sign is that of distances."""
    found = Results("m", measured).relation("divergence_NN")
    upper = np.triu_indices(4, 1)
    for i, layer in enumerate(measured.layers):
        expected = stats.spearmanr(layer.weights_NN[upper], layer.divergence_NN[upper]).statistic
        assert found.by_layer[i] == pytest.approx(expected)
    changed = [
        dataclasses.replace(layer, divergence_NN=-layer.weights_NN) for layer in measured.layers
    ]
    found = Results("m", dataclasses.replace(measured, layers=changed)).relation("divergence_NN")
    assert found.by_layer == (pytest.approx(-1),) * 2 and found.median == pytest.approx(-1)
    nothing = [dataclasses.replace(layer, weights_NN=None) for layer in measured.layers]
    assert (
        Results("m", dataclasses.replace(measured, layers=nothing)).relation("outputs_NN") is None
    )


def test_heads_that_share_keys_are_told_apart(measured):
    """Heads 0 and 1 read one KV head, 2 and 3 another."""
    layer = measured.layers[0]
    x_NN = np.arange(16.0).reshape(4, 4)
    assert layer.pairs(x_NN, shared=True).tolist() == [1, 11]
    assert layer.pairs(x_NN, shared=False).tolist() == [2, 3, 6, 7]
    assert len(layer.pairs(x_NN)) == 6
    apart_NN = np.where(np.kron(np.eye(2), np.ones((2, 2))), 0.1, 0.5)
    changed = [dataclasses.replace(layer, divergence_NN=apart_NN)] * 2
    found = Results("m", dataclasses.replace(measured, layers=changed))
    assert found.layers_where_sharing_is_alike("divergence_NN") == (2, 2)
    said = report._lead(found)
    assert "share a KV head by 0.10, others by 0.50 (the former lower in 2 of 2 layers)" in said
    alone = [dataclasses.replace(layer, num_kv_heads=4) for layer in measured.layers]
    found = Results("m", dataclasses.replace(measured, layers=alone))
    assert found.layers_where_sharing_is_alike("divergence_NN") is None
    assert "share a KV head" not in report._lead(found)
    assert list(report._kinds(found)) == ["all pairs"]


def test_one_sequence_and_one_layer_have_none_to_be_compared_with(measured):
    one_NN = np.ones((1, 1))
    few = dict(layers=measured.layers[:1], sequences=1, inputs_LL=one_NN, outputs_LL=one_NN)
    found = Results("m", dataclasses.replace(measured, **few))
    assert report._layers(found).alternative == (
        "inputs of attention: there is one layer, 1 with itself; outputs of heads: there is one "
        "layer, 1 with itself."
    )
    assert "two passages" in report._breadth(Results("m", measured)).alternative
    assert "two passages" not in report._breadth(found).alternative


def test_heads_are_chosen_once_for_what_they_have_most_of(measured):
    found = Results("made", measured)
    chosen = found.chosen()
    assert len({(head.layer, head.head) for head in chosen}) == len(chosen) == 6
    first = chosen[0]
    most = max(x_N.max() for x_N in measured.statistic("previous_N"))
    assert first.role == "token before" and found.statistics(first)["previous_N"] == most
    near = min(
        value
        for i, x_N in enumerate(measured.statistic("distance_N"))
        for n, value in enumerate(x_N)
        if (i, n) not in {(head.layer, head.head) for head in chosen[:2]}
    )
    assert found.statistics(chosen[2])["distance_N"] == near
    map_TT = found.map(first)
    np.testing.assert_allclose(np.nansum(map_TT, axis=1), 1, rtol=1e-5)
    assert np.isnan(map_TT[~Mask(window=9).visible(LENGTH)]).all()
    repeated = next(head for head in chosen if head.role == "induction")
    assert found.map(repeated).shape == (18, 18)


def test_maps_of_heads_that_are_asked_for(measured):
    """Those alone, on the text; each told with where its attention goes."""
    found = Results("made", measured, [(1, 3), (0, 0)])
    assert [head.name for head in found.shown()] == ["1.3", "0.0"]
    figure = report._maps(found)
    share = measured.layers[1].statistics["first_N"][3]
    assert f"head 1.3: first token {share:.2f}" in figure.alternative
    np.testing.assert_allclose(
        np.nan_to_num(found.map(found.shown()[0])), measured.layers[1].text_NTT[3], rtol=1e-6
    )
    assert [one["head"] for one in found.data()["maps"]] == ["1.3", "0.0"]


# -- what is said ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_is_a_page_and_json(section):
    json.dumps(section.data, allow_nan=False)
    assert document.page("t", "", [section], {}).count("<svg") == len(section.figures) == 7
    assert len(section.tables) == 3
    for figure in section.figures:
        assert re.search(r"\d", figure.alternative) and figure.text.paper
    for table in section.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
        table.shown()
    heads, pairs, layers = section.tables
    assert len(heads.rows) == 8  # of 18 places: every head stands once
    assert len(pairs.rows) == 3 * len(DISTANCES) and len(layers.rows) == 2


@pytest.mark.slow
def test_numbers_of_the_report(measured, section):
    layer = measured.layers[1]
    found = section.data["layers"][1]
    np.testing.assert_allclose(found["heads"]["entropy"], layer.statistics["entropy_N"], atol=1e-6)
    np.testing.assert_allclose(found["divergence"], layer.divergence_NN, atol=1e-6)
    upper = np.triu_indices(4, 1)
    every = np.concatenate([one.divergence_NN[upper] for one in measured.layers])
    assert section.data["pairs"]["divergence"]["all"]["median"] == pytest.approx(np.median(every))
    assert f"by {np.median(every):.2f} nats" in section.lead
    first = sum(int((one.statistics["first_N"] > 0.5).sum()) for one in measured.layers)
    assert f"of 8 heads {first} give more than half" in section.lead
    assert f"{math.log(2):.2f} is the most" in section.lead


MODELS = {
    "one head": ("llama", workdirs.grouped(1, 1, num_heads=1, qk_norm="none")),
    "two heads": ("llama", workdirs.grouped(2, 1, num_heads=2, qk_norm="none")),
    "mqa": ("nanochat", workdirs.grouped(1, 1)),
    "mla": ("nanochat", workdirs.mla()),
    "not linear": ("llama", workdirs.grouped(4, 1, 3, qk_norm="rms_gain", rope="shared")),
    "both ways": ("gpt2", workdirs.grouped(4, 4, qk_norm="none", bias=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_other_models_and_one_short_text(name):
    """One sequence of one text: nothing to compare it with. Weights of some have no matrices."""
    block, mechanism = MODELS[name]
    keys = dict(causal=False) if name == "both ways" else {}
    model = _model(block, mechanism, num_layers=1, **keys)
    found = report.section(model, Request(SHORT, (16,)))
    json.dumps(found.data, allow_nan=False)
    assert len(found.figures) == (5 if name == "one head" else 7)
    assert found.data["layers"][0]["heads"]["content"][0] is None
    assert ("share a KV head" in found.lead) is False
    related = found.data["weights_and_behaviour"]["divergence"] is not None
    assert related == (name in ("mqa", "mla", "both ways")) == ("rank correlation" in found.lead)
    document.page("t", "", [found], {})


@pytest.mark.slow
def test_layers_of_several_kinds():
    model = _model(
        "nanochat", [workdirs.grouped(4, 2, 3), workdirs.grouped(2, 2, num_heads=2)], num_layers=2
    )
    found = report.section(model, REQUEST)
    json.dumps(found.data, allow_nan=False)
    assert [len(layer["divergence"]) for layer in found.data["layers"]] == [4, 2]


def test_windows_are_compared_with_those_of_another_text():
    """Also where a text has fewer; and of one text with each other."""

    def pairs(*lengths):
        return measurements._rows(
            {str(i): np.zeros(n, np.int32) for i, n in enumerate(lengths)}, 10
        )[1].tolist()

    assert pairs(25, 25) == [2, 3, 0, 1]
    assert pairs(25, 10, 20) == [2, 2, 3, 0, 1]
    assert pairs(20) == [1, 0] and pairs(10) == [0]


@pytest.mark.slow
def test_fewer_words_than_a_block_has():
    """What is repeated is then all of them."""
    transformer = dataclasses.replace(_model(num_layers=1).transformer, vocab_size=5)
    tokens_T = np.random.default_rng(0).integers(0, 5, 40).astype(np.int32)
    found = measurements.measure(workdirs.Made(transformer), {"one": tokens_T}, 20, 0)
    assert found.block == 5


def test_bad_input(model):
    with pytest.raises(UserError, match="model.window = 1: every token attends to itself only"):
        report.check(_model(window=1), REQUEST)
    with pytest.raises(UserError, match="lengths = 15: .* at least 16 tokens"):
        report.check(model, Request(TEXTS, (4, 15)))
    with pytest.raises(UserError, match="text 'one' has 16 tokens, fewer than the length 20"):
        report.section(model, Request(SHORT, (20,)))
    broken = _model()
    broken.weights[("embedding",)][TEXTS["one"][3]] = np.inf
    with pytest.raises(UserError, match="layer 0 of made: queries on the text are not finite"):
        report.section(broken, REQUEST)


def test_all_that_it_says(model, measured, monkeypatch):
    texts = {name: np.zeros(5000, np.int32) for name in TEXTS}
    asked = []
    monkeypatch.setattr(measurements, "measure", lambda *given: (asked.append(given), measured)[1])
    golden.note_drawings(monkeypatch)
    golden.check(report.section(model, Request(texts, (15, 5000), seed=3)))
    assert asked == [(model, texts, 5000, 3)]
