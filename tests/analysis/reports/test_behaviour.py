"""The report on attention patterns: its measurements and text."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from kvjax.analysis.measures import activations, cka, diversity, heads as heads_lib, patterns
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.reports.behaviour import measurements, report
from kvjax.analysis.reports.behaviour.results import Results
from kvjax.analysis.request import Request
from kvjax.foundation.errors import UserError
from tests import golden
from tests.analysis import models
from tests.convert import workdirs

LENGTH = 20
TEXTS = models.texts(50)
REQUEST = Request(TEXTS, (6, LENGTH))
SHORT = {"one": TEXTS["one"][:16]}


@pytest.fixture(scope="module")
def model():
    return models.model(window=9)


@pytest.fixture(scope="module")
def measured(model):
    return measurements.measure(model, TEXTS, LENGTH, seed=0)


def test_numbers_are_those_of_the_functions(model, measured):
    """Means over the first two windows of each text."""
    assert (measured.sequences, measured.length) == (4, LENGTH)
    assert {layer.mask for layer in measured.layers} == {Mask(window=9)}
    rows_BT = np.concatenate([tokens_T[: 2 * LENGTH].reshape(2, -1) for tokens_T in TEXTS.values()])
    visible_TT = Mask(window=9).visible(LENGTH)
    for i, layer in enumerate(activations.layers(model, rows_BT)):
        found = measured.layers[i]
        by_sequence = [activations.attention(layer, b) for b in range(4)]
        p_BNTT, o_BTNH = (np.stack(x) for x in zip(*by_sequence, strict=True))
        for name in patterns.Statistics._fields:
            expected_BN = [getattr(patterns.statistics(p, visible_TT), name) for p in p_BNTT]
            np.testing.assert_allclose(found.statistics[name], np.mean(expected_BN, axis=0))
        between_passages = [  # each window with one of the other text
            patterns.divergence(p_BNTT[b], p_BNTT[(b + 2) % 4], visible_TT) for b in range(4)
        ]
        np.testing.assert_allclose(found.statistics["content_N"], np.mean(between_passages, axis=0))
        between_heads = [patterns.divergences(p, visible_TT) for p in p_BNTT]
        np.testing.assert_allclose(found.divergence_NN, np.mean(between_heads, axis=0))
        without_first = [
            patterns.divergences(*patterns.without_first(p, visible_TT)) for p in p_BNTT
        ]
        np.testing.assert_allclose(found.without_first_NN, np.mean(without_first, axis=0))
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
    """Repeats tokens of the texts, in a block that fits the window."""
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
    """Compares with Spearman's correlation over the pairs of each layer."""
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


def test_each_role_has_the_head_with_the_most_of_it(measured):
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


def test_windows_are_compared_with_those_of_another_text():
    """Covers texts of fewer windows; a single text's windows are compared with each other."""

    def pairs(*lengths):
        return measurements._rows(
            {str(i): np.zeros(n, np.int32) for i, n in enumerate(lengths)}, 10
        )[1].tolist()

    assert pairs(25, 25) == [2, 3, 0, 1]
    assert pairs(25, 10, 20) == [2, 2, 3, 0, 1]
    assert pairs(20) == [1, 0] and pairs(10) == [0]


@pytest.mark.slow
def test_vocabulary_smaller_than_a_block():
    transformer = dataclasses.replace(models.model(num_layers=1).transformer, vocab_size=5)
    tokens_T = np.random.default_rng(0).integers(0, 5, 40).astype(np.int32)
    found = measurements.measure(workdirs.Made(transformer), {"one": tokens_T}, 20, 0)
    assert found.block == 5


def test_pairs_by_kv_head(measured):
    """Heads 0 and 1 read one KV head, 2 and 3 another."""
    layer, x_NN = measured.layers[0], np.arange(16.0).reshape(4, 4)
    assert layer.pairs(x_NN, shared=True).tolist() == [1, 11]
    assert layer.pairs(x_NN, shared=False).tolist() == [2, 3, 6, 7]
    assert len(layer.pairs(x_NN)) == 6
    alone = [dataclasses.replace(layer, num_kv_heads=4) for layer in measured.layers]
    found = Results("m", dataclasses.replace(measured, layers=alone))
    assert list(report._kinds(found)) == ["all pairs"]


def test_requested_heads_are_shown(measured):
    found = Results("made", measured, [(1, 3), (0, 0)])
    assert [head.name for head in found.shown()] == ["1.3", "0.0"]
    map_TT = np.nan_to_num(found.map(found.shown()[0]))
    np.testing.assert_allclose(map_TT, measured.layers[1].text_NTT[3], rtol=1e-6)
    assert [one["head"] for one in found.data()["maps"]] == ["1.3", "0.0"]


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
    """Has one sequence, without another to compare with; heads of some have no matrices."""
    block, mechanism = MODELS[name]
    keys = dict(causal=False) if name == "both ways" else {}
    model = models.model(block, mechanism, num_layers=1, **keys)
    found = report.section(model, Request(SHORT, (16,)))
    models.check_section(found)
    assert len(found.figures) == (5 if name == "one head" else 7)
    assert found.data["layers"][0]["heads"]["content"][0] is None
    related = found.data["weights_and_behaviour"]["divergence"] is not None
    assert related == (name in ("mqa", "mla", "both ways"))


@pytest.mark.slow
def test_layers_of_several_kinds():
    mechanisms = [workdirs.grouped(4, 2, 3), workdirs.grouped(2, 2, num_heads=2)]
    found = report.section(models.model("nanochat", mechanisms), REQUEST)
    models.check_section(found)
    assert [len(layer["divergence"]) for layer in found.data["layers"]] == [4, 2]


def test_rows_without_a_choice_of_keys_are_refused(model):
    with pytest.raises(UserError, match="model.window = 1: every token attends to itself only"):
        report.check(models.model(window=1), REQUEST)
    with pytest.raises(UserError, match="lengths = 15: .* at least 16 tokens"):
        report.check(model, Request(TEXTS, (4, 15)))


def test_report_is_as_before(model, measured, monkeypatch):
    models.check_section(report._section(Results("made", measured)))
    texts = {name: np.zeros(5000, np.int32) for name in TEXTS}
    calls = []
    monkeypatch.setattr(measurements, "measure", lambda *given: (calls.append(given), measured)[1])
    golden.note_drawings(monkeypatch)
    golden.check(report.section(model, Request(texts, (15, 5000), seed=3)))
    assert calls == [(model, texts, 5000, 3)]
