"""Other authors' mechanisms: parameters, and options against the reference."""

import dataclasses

import pytest

from kvjax.attention import MFAKRConfig
from tests import reference
from tests.attention.one_layer import (
    BASE,
    COMMON,
    D,
    H,
    N,
    P,
    X,
    close,
    from_cache,
    gla_config,
    gta_config,
    mla_lrkv_config,
    mlra_config,
    run,
    shared_kv_config,
    tpa_config,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")


PARAMETERS = [  # of one layer without gates, norms' gains and the output projection
    (gla_config(2), D * N * (H + P) + D * (2 * 6 + P) + 6 * N * 2 * H),
    (gla_config(2, query_rank=5), D * 5 + 5 * N * (H + P) + D * (12 + P) + 6 * N * 2 * H),
    (mlra_config(2, 2), D * N * (H + P) + D * (4 * 6 + P) + 2 * 6 * N * 2 * H),
    (mlra_config(4, 1), D * N * (H + P) + D * (4 * 6 + P) + 4 * 6 * N * 2 * H),
    (mla_lrkv_config(2), D * N * (H + P) + D * (6 + P) + 12 * N * H + 2 * N * 2 * (D + H)),
    (gta_config(P), D * N * H + D * 2 * H + D * P),
    (shared_kv_config(P), D * N * H + D * 2 * H),
    (MFAKRConfig(**COMMON, num_kv_heads=1), D * N * H + D * H + H * H + H),
    (tpa_config(2, query_factors=3), D * (N + H) * (3 + 2 + 2)),
    (tpa_config(2), D * (N + H) * (2 + 2) + D * N * H),
]


@pytest.mark.parametrize("config, expected", PARAMETERS, ids=lambda v: type(v).__name__)
def test_parameters(randomise, config, expected):
    w = weights(randomise, config)

    def count(tree):
        return sum(map(count, tree.values())) if isinstance(tree, dict) else tree.size

    assert count(w["mechanism"]) == expected
    assert w["out"].size == N * config.value_dim * D


OPTIONS = [  # no two sizes of one layer are equal
    tpa_config(2, qk_norm="rms_gain", query_factors=3, output_gate=True),
    tpa_config(2, qk_norm="rms_gain", query_rank=5, latent_scale=True),
    dataclasses.replace(gla_config(2, latent_scale=True, output_gate=True), value_dim=5),
    dataclasses.replace(mla_lrkv_config(2, qk_norm="rms_gain"), value_dim=5),
    mla_lrkv_config(0),
    mlra_config(2, 2, qk_norm="rms_gain"),
    gta_config(P, qk_norm="rms_gain", query_rank=5),
    gta_config(0, qk_norm="none"),
    shared_kv_config(P, latent_scale=True, query_rank=5, output_gate=True),
    MFAKRConfig(**COMMON, num_kv_heads=2, qk_norm="rms_gain"),
]


@pytest.mark.parametrize("config", OPTIONS, ids=lambda c: type(c).__name__)
def test_equals_the_reference(randomise, config):
    """On whole rows, and decoded in two halves over a cache."""
    w = weights(randomise, config)
    expected = reference.attention(config, w, X, base=BASE, causal=True)
    close(run(config, w), expected)
    close(from_cache(config, w), expected)
