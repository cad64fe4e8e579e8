"""The comparison of a model's outputs from the cache with those of whole rows."""

import jax
import numpy as np
import pytest

from experiments.benchmarks import exactness
from kvjax.attention import GroupedConfig
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute, Transformer


def _model(randomise):
    attention = GroupedConfig(
        num_heads=4, num_kv_heads=4, num_bases=1, rank=4, key_dim=8, value_dim=8
    )
    block = BlockConfig(num_layers=2, d_model=32, mlp_dim=64)
    config = TransformerConfig(block=block, mechanisms=(attention,) * 2, vocab_size=50)
    return randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)[0]


@pytest.mark.slow
def test_lrkv_from_the_cache_is_the_model_recomputed(randomise):
    model, compute = _model(randomise), Compute()
    tokens_BT = np.random.default_rng(0).integers(0, 50, (2, 80)).astype(np.int32)
    full_BTV = np.asarray(model.logits(model(tokens_BT, compute=compute)))
    for prefill in (1, 32):
        cached = exactness.from_cache(model, tokens_BT, prefill=prefill, compute=compute)
        result = exactness.compare(full_BTV, cached)
        assert result["largest_difference"] < 1e-5
        assert result["same_token_where_clear"] == result["clear_positions"] > 150


def test_only_differences_beyond_rounding_fail():
    full = np.array([[[0.0, 1.0, 4.0], [2.0, 4.0, 4.0 - 1e-6]]])
    other = np.array([[[0.0, 4.0, 1.0], [2.0, 4.0 - 1e-6, 4.0]]])
    result = exactness.compare(full, other)
    assert result["largest_difference"] == 0.75
    assert result["same_token"] == 0
    assert (result["clear_positions"], result["same_token_where_clear"]) == (1, 0)
    assert exactness.compare(full, full)["same_token"] == 2
