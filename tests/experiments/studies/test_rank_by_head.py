"""Truncated residuals: best approximations, and equal totals for every way to divide ranks."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import rank_by_head
from experiments.studies.rank_allocation import allocation
from experiments.studies.rank_by_head import Judge, Residuals
from kvjax import config as config_lib
from kvjax.analysis.measures import spectrum
from kvjax.foundation.errors import UserError
from kvjax.model.loss import token_losses
from kvjax.model.transformer import Compute, Transformer
from tests import runs

L, D, K, R, H = 2, 12, 3, 4, 6


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    shapes = dict(latent=(L, D, K, R), expand=(L, K, R, H))
    return {
        f"{name}_{part}": rng.standard_normal(shape) * (1 + 2 * (part == "value"))
        for name, shape in shapes.items()
        for part in ("key", "value")
    }


def _products(weights, part):
    return np.einsum("ldkr,lkrh->lkdh", weights[f"latent_{part}"], weights[f"expand_{part}"])


def test_uncut_they_are_the_same_function(weights):
    found = Residuals.of(weights).cut(np.full((L, 2, K), R))
    assert {name: x.shape for name, x in found.items()} == {n: x.shape for n, x in weights.items()}
    for part in ("key", "value"):
        np.testing.assert_allclose(_products(found, part), _products(weights, part), atol=1e-12)


def test_cut_they_are_the_nearest_of_their_ranks(weights):
    ranks_LPK = np.arange(L * 2 * K).reshape(L, 2, K) % (R + 1)
    found = Residuals.of(weights).cut(ranks_LPK)
    for i, part in enumerate(("key", "value")):
        whole, cut = _products(weights, part), _products(found, part)
        for layer, head in np.ndindex(L, K):
            rank = ranks_LPK[layer, i, head]
            assert np.linalg.matrix_rank(cut[layer, head]) == rank
            lost = np.linalg.svd(whole[layer, head], compute_uv=False)[rank:]
            off = np.linalg.norm(whole[layer, head] - cut[layer, head])
            assert off == pytest.approx(np.linalg.norm(lost), abs=1e-12)


@pytest.mark.parametrize("way", rank_by_head.WAYS)
def test_there_are_as_many_ranks(weights, way):
    ranks_LPK = Residuals.of(weights).ranks(way, 2)
    assert ranks_LPK.shape == (L, 2, K) and ranks_LPK.max() <= R
    assert ranks_LPK.sum() == 2 * L * 2 * K


def test_larger_effective_ranks_get_more_ranks(weights):
    weights["latent_key"][0, :, 1] *= 10  # a head with large singular values,
    weights["latent_value"][1, :, :2] *= [1, 1e-4, 1e-4, 1e-4]  # and two with a single one
    residuals = Residuals.of(weights)
    by_value = residuals.ranks("by singular value", 2)
    assert by_value[0, 0, 1] == R and by_value[1, 1, :2].max() <= 1
    by_head = residuals.ranks("by head", 2)
    assert by_head[1, 1].tolist() == [1, 1, 3] and by_head[0, 0].tolist() == [2, 2, 2]
    for ranks_LPK in (by_value, by_head):
        assert (
            ranks_LPK.sum(axis=(0, 2)).tolist() == [2 * L * K] * 2
        )  # of keys and of values separately
    weights["latent_value"][1] *= [1, 1e-4, 1e-4, 1e-4]  # all values of a layer
    by_layer = Residuals.of(weights).ranks("by layer", 3)
    assert (by_layer[0] == 4).all() and (by_layer[1] == 2).all()
    with pytest.raises(ValueError, match="'by rank': must be one of"):
        residuals.ranks("by rank", 2)


def test_effective_ranks_are_of_energies(weights):
    """Effective ranks use squared singular values, as in LRKV's appendix C.1."""
    weights["expand_key"][:] *= np.geomspace(1, 0.1, R)[:, None]
    weights["expand_key"][0, 1] = weights["expand_value"][0, 1]
    singular = np.linalg.svd(_products(weights, "key"), compute_uv=False)[..., :R]
    expected = allocation(spectrum.effective_rank(singular**2).ravel(), 2 * L * K, R)
    found = Residuals.of(weights).ranks("by head", 2)[:, 0]
    assert found.ravel().tolist() == expected
    assert expected != allocation(spectrum.effective_rank(singular).ravel(), 2 * L * K, R)


def _model(**mechanism):
    """Returns a model without zero weights."""
    config = runs.small_config("embedded", "")
    config.attention.update(mechanism)
    model = Transformer(config_lib.resolve(config).model, jax.random.key(0))
    graph, params = nnx.split(model)
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params))


@pytest.mark.slow
def test_a_model_is_judged_with_other_residuals():
    model, compute = _model(), Compute()
    rows = np.random.default_rng(0).integers(0, 256, (12, 9)).astype(np.int32)
    judge = Judge(model, compute, rows, 4.0)
    whole = judge.bits_per_byte()
    nats = token_losses(model, jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:]), compute=compute)
    assert whole == pytest.approx(float(nats.mean()) / math.log(2) / 4, rel=1e-6)
    uncut, first, *others = rank_by_head.measure(judge, (judge.rank, 1))
    assert uncut == dict(rank=4, way="uncut", least=4, most=4, bpb=whole)
    assert first["way"] == "equal" and first["bpb"] == pytest.approx(whole, rel=1e-5)
    assert [row["way"] for row in others] == [*rank_by_head.WAYS[1:], *rank_by_head.WAYS]
    cut = others[3]["bpb"]
    assert abs(cut / whole - 1) > 1e-6 and (others[3]["least"], others[3]["most"]) == (1, 1)
    assert judge.bits_per_byte() == whole  # the model is unchanged


@pytest.mark.slow
def test_a_model_without_residuals_is_refused():
    rows = np.zeros((1, 9), np.int32)
    with pytest.raises(UserError, match="needs layers of one kind with residuals of keys"):
        Judge(_model(rank=0), Compute(), rows, 4.0)


def test_differences_are_seed_by_seed():
    def row(way, bpb):
        return dict(rank=8, way=way, bpb=bpb, least=7, most=9)

    uncut = dict(rank=16, way="uncut", bpb=1.0, least=16, most=16)
    by_seed = {
        0: [uncut, row("equal", 2.0), row("by head", 1.9)],
        1: [uncut, row("equal", 3.0), row("by head", 2.9) | dict(least=5, most=11)],
    }
    whole, equal, by_head = rank_by_head.summary(by_seed)
    assert whole["bpb"] == 1 and whole["change"] is None
    assert equal["bpb"] == 2.5 and equal["change"] is None and equal["seeds"] == 2
    assert by_head["change"] == pytest.approx(-0.1)
    assert by_head["change_half_interval"] == pytest.approx(0, abs=1e-9)
    assert (by_head["least"], by_head["most"]) == (5, 11)
