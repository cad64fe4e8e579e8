"""Ranks by layer: the smallest that keep the energy, the best within a budget."""

import dataclasses
import itertools

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention, GroupedConfig
from kvjax.convert import budget, layer as layer_lib, model as model_lib
from kvjax.convert.budget import RankChoices
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.latent_method import LatentAttention
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig, TransformerConfig
from tests.convert import comparison

HALF = jnp.dtype("bfloat16")


def _layer(ranks, sizes=None):
    return RankChoices(list(ranks), sizes or [4 + 2 * rank for rank in ranks])


def test_by_energy():
    layers, lost = [_layer((1, 2, 3, 4))] * 2, [[0.5, 0.2, 0.1, 0.0], [0.16, 0.06, 0.01, 0.0]]
    assert budget.ranks_by_energy(layers, lost, 0.5) == [1, 1]
    assert budget.ranks_by_energy(layers, lost, 0.8) == [2, 1]
    assert budget.ranks_by_energy(layers, lost, 0.95) == [4, 3]
    assert budget.ranks_by_energy(layers, lost, 1.0) == [4, 4]
    assert budget.ranks_by_energy([_layer((2, 3))], [[0.4, 0.3]], 0.9) == [3]


@pytest.mark.parametrize("step", [1, 2])
def test_within_a_budget_nothing_keeps_more(step):
    rng = np.random.default_rng(0)
    shares = [np.sort(rng.dirichlet(np.ones(6)))[::-1] for _ in range(3)]
    ranks = list(range(step, 7, step))
    lost = [[share[rank:].sum() for rank in ranks] for share in shares]
    for allowed in range(24, 50):
        found = budget.ranks_within_budget([_layer(ranks)] * 3, lost, allowed)

        def kept(ranks):
            return sum(s[:r].sum() for s, r in zip(shares, ranks, strict=True))

        def used(ranks):
            return sum(4 + 2 * rank for rank in ranks)

        best = max(kept(c) for c in itertools.product(ranks, repeat=3) if used(c) <= allowed)
        assert used(found) <= allowed and kept(found) == pytest.approx(best)


def test_steps_by_energy_per_byte():
    """The first layer's step keeps more energy, for four times the bytes."""
    layers, lost = [_layer((1, 2), [2, 10]), _layer((1, 2), [2, 4])], [[0.5, 0.1], [0.3, 0.1]]
    assert budget.ranks_within_budget(layers, lost, 6) == [1, 2]
    assert budget.ranks_within_budget(layers, lost, 12) == [1, 2]
    assert budget.ranks_within_budget(layers, lost, 14) == [2, 2]


def test_too_small_budget():
    layers = [_layer((2, 4))] * 2
    budget.check_budget(layers, 16)
    with pytest.raises(
        UserError, match="rank 2 in every layer takes 16 bytes per token in bfloat16, more"
    ):
        budget.check_budget(layers, 15)


def _model(make_mechanism, name):
    mechanism = make_mechanism(name, qk_norm="none")
    block = BlockConfig(num_layers=2, d_model=16, mlp_dim=16)
    return TransformerConfig(block=block, mechanisms=(mechanism,) * 2, vocab_size=9)


def test_rank_choices_never_enlarge_the_cache(make_mechanism):
    """Two KV heads of 8 channels take 32 elements per token, LRKV's take 2 · (8 + 2 · R)."""
    gqa = _model(make_mechanism, "gqa")
    assert (
        budget.rank_choices(gqa, ThinKeys(rank=1), 3, HALF)
        == [RankChoices([3, 6, 8], [2 * 2 * (rank + 8) for rank in (3, 6, 8)])] * 2
    )
    assert (
        budget.rank_choices(gqa, LowRankKV(rank=1), 1, HALF)
        == [RankChoices([1, 2, 3, 4], [2 * 2 * (8 + 2 * rank) for rank in (1, 2, 3, 4)])] * 2
    )
    with pytest.raises(UserError, match="multiple = 5: takes 72 bytes.* source 64: give at most 4"):
        budget.rank_choices(gqa, LowRankKV(rank=1), 5, HALF)
    mqa = _model(make_mechanism, "mqa")
    with pytest.raises(UserError, match="no rank makes this cache smaller"):
        budget.rank_choices(mqa, LowRankKV(rank=1), 1, HALF)
    with pytest.raises(UserError, match="rank = 7: takes .*: give at most 4"):
        budget.check_smaller(*gqa.layers[0], LowRankKV(rank=7), HALF, "rank")


def test_rank_choices_see_the_rope_of_each_layer(make_mechanism):
    """MLA takes no layer without RoPE, in a model with RoPE."""
    config = _model(make_mechanism, "gqa")
    block = dataclasses.replace(config.block, rope_layers=(1, 0))
    config = dataclasses.replace(config, block=block)
    with pytest.raises(UserError, match="needs a model with RoPE in every layer"):
        budget.rank_choices(config, LatentAttention(rank=2), 2, HALF)


@pytest.mark.parametrize(
    "method",
    [
        ThinKeys(rank=1),
        ThinKeys(rank=1, part="key_value"),
        ThinKeys(rank=1, part="both"),
        ThinKeys(rank=1, part="value", mode="joint"),
        LowRankKV(rank=1, step=2),
        LowRankKV(rank=1, step=2, align=False, objective="inputs"),
    ],
    ids=str,
)
def test_energy_losses_equal_a_conversions_errors(x64, randomise, method):
    """Covers LRKV, whose alternation starts from the previous rank."""
    config = GroupedConfig(
        num_heads=4, num_kv_heads=2, num_bases=2, rank=0, key_dim=8, value_dim=6, qk_norm="none"
    )
    _, weights = randomise(lambda: Attention(config, 16, rngs=nnx.Rngs(0)))
    layer = layer_lib.read(weights, config, rope=10_000.0)
    x = np.random.default_rng(0).standard_normal((99, 16))
    moment = x.T @ x / 99
    largest = method.max_rank(config)
    assert largest == (
        12
        if method == ThinKeys(rank=1, part="value", mode="joint")
        else 8 - 2 * (isinstance(method, LowRankKV) or method.part == "key_value")
    )

    def with_rank(rank):
        return dataclasses.replace(method, rank=rank)

    with pytest.raises(UserError, match=f"rank = {largest + 1}: must lie in"):
        with_rank(largest + 1).mechanism(config, rope=10_000.0)
    ranks = [2, 4, largest] if largest == 6 else [2, 4, 6, largest]
    found = method.energy_losses(layer, moment, ranks)
    lost = [np.mean(list(with_rank(rank).convert(layer, moment).errors.values())) for rank in ranks]
    assert found == pytest.approx(lost, abs=1e-9)
    assert found[0] > 0.02 and found == sorted(found, reverse=True)


@pytest.mark.parametrize("mode", ["joint", "per_head"])
def test_split_budget_is_optimal(mode):
    """Compares with the errors of every pair of ranks; large and small sensitivities of keys."""
    source = model_lib.open(str(comparison.PUBLISHED / "llama_tied_bias"))
    method = ThinKeys(rank=99, mode=mode, part="key_value")  # its rank is replaced
    layers = range(2)
    rng = np.random.default_rng(0)
    moments = [(x := rng.standard_normal((40, 17))).T @ x / 40 for _ in layers]
    limits = dict(multiple=1, dtype=HALF)

    def find(size, w):
        return budget.split_budget(source, method, moments, w, budget=size, **limits)

    def cost(found):
        model = ConvertedModel(source, [found] * 2, moments)
        for layer in layers:
            model_lib.read_layer(model, layer, "attention")
        return sum(sum(errors.values()) for errors in model.errors.values())

    most = 8 if mode == "joint" else 4
    ranks = range(1, most + 1)
    candidates = [dataclasses.replace(method, rank=k, value_rank=v) for k in ranks for v in ranks]
    costs = {(found.rank, found.value_rank): cost(found) for found in candidates}
    size = 2 * 2 * (8 // most)  # bytes of a rank, of both layers
    for total in range(2, 2 * most):
        found = find(size * total, None)
        value_rank = found.value_rank or most
        assert found.rank + value_rank <= total
        least = min(cost for pair, cost in costs.items() if sum(pair) <= total)
        assert costs[found.rank, value_rank] == pytest.approx(least)
    large, small = find(size * most, [1e9] * 2), find(size * most, [1e-9] * 2)
    assert (large.rank, large.value_rank, small.rank, small.value_rank) == (
        most - 1,
        1,
        1,
        most - 1,
    )
    unfactored_values = find(size * (most + 1), [1e-9] * 2)
    assert (unfactored_values.part, unfactored_values.rank) == ("key", 1)  # values are not factored


@pytest.mark.parametrize(
    "name, rope", [("gpt2", False), ("llama_tied_bias", True), ("qwen3", True)]
)
def test_logit_variance(name, rope):
    """Compares with the logits of random inputs at random positions."""
    source, rng = model_lib.open(str(comparison.PUBLISHED / name)), np.random.default_rng(1)
    mechanism = source.transformer.mechanisms[0]
    layer = layer_lib.read(model_lib.read_layer(source, 0, "attention"), mechanism, rope=rope)
    x, y = rng.standard_normal((2, 4000, 16))
    one = np.ones((4000, 1))[:, : layer.query_ENH.shape[0] - 16]
    x, y = np.concatenate([x, one], axis=1), np.concatenate([y, one], axis=1)
    key_KH = np.einsum("BE,EKH->BKH", x, layer.key_EKH)
    query_NH = np.einsum("BE,ENH->BNH", y, layer.query_ENH)
    H = mechanism.key_dim
    if mechanism.qk_norm != "none":

        def normalised(z, gain):
            return gain * z / np.sqrt(np.mean(z**2, axis=-1, keepdims=True))

        key_KH, query_NH = (
            normalised(key_KH, layer.gains["key_norm"]),
            normalised(query_NH, layer.gains["query_norm"]),
        )
    if rope:
        rotation = np.exp(1j * rng.uniform(0, 2 * np.pi, (4000, 1, H // 2)))
        pairs = (key_KH[..., : H // 2] + 1j * key_KH[..., H // 2 :]) * rotation
        key_KH = np.concatenate([pairs.real, pairs.imag], axis=-1)
    key_NH = np.repeat(key_KH, query_NH.shape[1] // key_KH.shape[1], axis=1)
    logits = np.sum(query_NH * key_NH, axis=-1) * mechanism.scale
    moment = x.T @ x / len(x) / 2 + y.T @ y / len(y) / 2
    assert layer_lib.logit_variance(layer, moment) == pytest.approx(np.mean(logits**2), rel=0.15)
