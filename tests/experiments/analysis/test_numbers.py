"""Numbers of the reports, against the functions that the reports call."""

import dataclasses

import numpy as np
import pytest

from experiments.analysis import numbers
from kvjax.analysis.measures import (
    activations,
    diversity,
    geometry,
    heads as heads_lib,
    logits,
    patterns,
    spectrum,
)
from kvjax.analysis.request import Request
from tests.convert import workdirs

LENGTH = 24
TEXTS = {
    name: np.random.default_rng(seed).integers(0, 256, 80).astype(np.int32)
    for seed, name in enumerate(("one", "two"))
}
REQUEST = Request(TEXTS, (LENGTH,))


def _model(*kv_heads_bases_rank, **keys):
    block = dataclasses.replace(workdirs.BLOCKS["llama"], num_layers=2, window=0)
    mechanism = workdirs.grouped(*kv_heads_bases_rank, qk_norm="none", **keys)
    return workdirs.Made(workdirs.config(block, mechanism))


@pytest.fixture(scope="module")
def lrkv():
    return _model(4, 1, 3)


@pytest.mark.slow
def test_effective_ranks_are_means_over_layers_in_percent(lrkv):
    found = numbers.diversity(lrkv, REQUEST)
    layers = list(heads_lib.layers(lrkv))
    shares = [100 * diversity.of_layer(heads).share for heads in layers]
    assert found["share"] == pytest.approx(np.mean(shares))
    assert [found[f"share_layer_{i}"] for i in range(2)] == pytest.approx(shares)
    turning = [diversity.of_layer(heads, num_distances=lrkv.context) for heads in layers]
    expected = np.mean([100 * one.centred_share for one in turning])
    assert found["centred_share_with_rope"] == pytest.approx(expected)
    values = np.mean([100 * diversity.of_layer(heads, "value").share for heads in layers])
    assert found["share_of_values"] == pytest.approx(values)


@pytest.mark.slow
def test_only_residuals_have_a_geometry(lrkv):
    found = numbers.geometry(lrkv, REQUEST)
    splits = [geometry.part_geometry(geometry.of_layer(lrkv, i)["key"]) for i in range(2)]
    assert found["key_overlap"] == pytest.approx(np.mean([one.overlap_K for one in splits]))
    assert list(numbers.geometry(_model(2, 2), REQUEST)) == ["key_total_norm"]


@pytest.mark.slow
def test_components_and_divergence_are_those_of_the_text(lrkv):
    rows_BT = np.stack([tokens_T[:LENGTH] for tokens_T in TEXTS.values()])
    layers = list(activations.layers(lrkv, rows_BT))
    found = numbers.logits(lrkv, REQUEST)
    fields = [
        logits.centred_logits(layer.query_BTNH[b], layer.key_BTKH[b], layer.scale)
        for layer in layers
        for b in range(2)
    ]
    ranks = np.concatenate([spectrum.energy_rank(field.energies_NR, 0.9) for field in fields])
    weights = [logits.Interaction(heads).energies() for heads in heads_lib.layers(lrkv)]
    of_m = np.median(spectrum.energy_rank(np.concatenate(weights), 0.9))
    assert found["components_of_e"] == np.median(ranks) and found["components_of_m"] == of_m
    assert found["m_over_e"] == of_m / np.median(ranks)
    one = {name: tokens_T[:LENGTH] for name, tokens_T in TEXTS.items()}
    behaviour = numbers.behaviour(lrkv, Request(one, (LENGTH,)))
    visible_TT = np.tri(LENGTH, dtype=bool)
    pairs = [
        patterns.divergences(activations.attention(layer, b)[0], visible_TT)[np.triu_indices(4, 1)]
        for layer in layers
        for b in range(2)
    ]
    assert behaviour["divergence"] == pytest.approx(np.mean(pairs))


@pytest.mark.slow
def test_reports_that_refuse_a_model_are_left_out():
    model = _model(4, 4, tie="qk", position_channels=4)
    assert numbers._if_there(numbers.compression, model, REQUEST) == {}
    assert "share" in numbers._if_there(numbers.diversity, model, REQUEST)


@pytest.mark.slow
def test_of_a_model_all_at_once(lrkv, monkeypatch):
    monkeypatch.setattr(numbers, "texts", lambda model: TEXTS)
    monkeypatch.setattr(lrkv, "context", 32)
    found = numbers.of_model(lrkv)
    assert all(np.isfinite(x) and type(x) is float for x in found.values())
    assert {"share", "key_overlap", "m_over_e", "divergence", "half_rank_by_text"} <= set(found)
    assert "half_rank_by_text" not in numbers.of_model(lrkv, trained=False)
