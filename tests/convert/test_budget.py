"""Ranks by layer: as little as keeps the energy, as much as the budget holds, and none better."""

import itertools

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention
from kvjax.attention import GroupedConfig
from kvjax.convert import budget
from kvjax.convert import layer as layer_lib
from kvjax.convert.methods import LowRankKV
from kvjax.convert.methods import ThinKeys
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig

SHARES = [np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.4, 0.1, 0.05, 0.01])]


def test_by_energy():
    """The second layer keeps 0.44 whatever its rank."""
    assert budget.by_energy(SHARES, 0.5, 1) == [1, 1]
    assert budget.by_energy(SHARES, 0.8, 1) == [2, 1]
    assert budget.by_energy(SHARES, 0.95, 1) == [4, 3]
    assert budget.by_energy(SHARES, 0.85, 2) == [4, 2]
    assert budget.by_energy(SHARES, 1.0, 3) == [4, 4]


@pytest.mark.parametrize("multiple", [1, 2])
def test_within_a_budget_nothing_keeps_more(multiple):
    rng = np.random.default_rng(0)
    shares = [np.sort(rng.dirichlet(np.ones(6)))[::-1] for _ in range(3)]
    bytes_of = [[4 + 2 * rank for rank in range(7)]] * 3
    for allowed in range(24, 50):
        ranks = budget.within(shares, bytes_of, allowed, multiple)
        kept = lambda ranks: sum(s[:r].sum() for s, r in zip(shares, ranks, strict=True))
        used = lambda ranks: sum(b[r] for b, r in zip(bytes_of, ranks, strict=True))
        choices = range(multiple, 7, multiple)
        best = max(kept(c) for c in itertools.product(choices, repeat=3) if used(c) <= allowed)
        assert used(ranks) <= allowed and kept(ranks) == pytest.approx(best)


def test_a_budget_that_holds_nothing():
    with pytest.raises(
        UserError, match="a rank of 2 in every layer takes 16 bytes per token, more"
    ):
        budget.within([np.ones(4)] * 2, [[4, 6, 8, 10, 12]] * 2, 15, 2)


@pytest.mark.parametrize("method", [ThinKeys(rank=1), LowRankKV(rank=1)], ids=str)
def test_spectra_are_what_ranks_keep(x64, randomise, method):
    """Of thin keys exactly what `convert` loses; of LRKV, whose base moves, no less than that."""
    config = GroupedConfig(
        num_heads=4, num_kv_heads=2, num_bases=2, rank=0, key_dim=8, value_dim=8, qk_norm="none"
    )
    _, weights = randomise(lambda: Attention(config, 16, rngs=nnx.Rngs(0)))
    layer = layer_lib.read(weights, config, rope=True)
    x = np.random.default_rng(0).standard_normal((99, 16))
    moment = x.T @ x / 99
    share = method.spectrum(layer, moment)
    assert len(share) == 8 and np.all(np.diff(share) <= 1e-9)
    for rank in (1, 4, 7):
        lost = np.mean(list(type(method)(rank=rank).convert(layer, moment).errors.values()))
        left = share[rank:].sum()
        if isinstance(method, ThinKeys):
            assert left == pytest.approx(lost, abs=1e-9)
        else:
            assert lost <= left + 1e-9


def test_bytes_by_rank(make_mechanism):
    gqa = make_mechanism("gqa", qk_norm="none")
    config = TransformerConfig(
        block=BlockConfig(num_layers=2, d_model=16, mlp_dim=16), mechanisms=(gqa,) * 2, vocab_size=9
    )
    by_rank = [ThinKeys(rank=max(rank, 1)) for rank in range(5)]
    found = budget.bytes_by_rank(config, by_rank, jnp.dtype("bfloat16"))
    assert found == [[2 * 2 * (max(rank, 1) + 8) for rank in range(5)]] * 2
