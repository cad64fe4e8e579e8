"""Queries of a rank, MFA and MFA-KR: what they are special cases of."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import GroupedConfig, MFAKRConfig
from tests import reference
from tests.attention.one_layer import (
    BOTH,
    COMMON,
    D,
    H,
    X,
    changed,
    close,
    logits,
    module,
    moved,
    noise,
    run,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_a_query_of_a_rank_is_a_dense_one_but_for_its_norm(randomise, without_latent_norms):
    """MFA is then MQA with as large a head."""
    mfa = GroupedConfig(**BOTH, num_kv_heads=1, num_bases=1, rank=0, query_rank=5)
    w = weights(randomise, mfa)
    own = w["mechanism"]
    dense = np.einsum("dc,cnh->dnh", own["query_down"], own["query"])
    mqa = dataclasses.replace(mfa, query_rank=0)
    rest = {k: v for k, v in own.items() if not k.startswith("query")}
    close(run(mfa, w), run(mqa, w | dict(mechanism=rest | dict(query=dense))))


def test_a_latent_of_queries_is_normed_and_scaled(randomise):
    mfa = GroupedConfig(**BOTH, num_kv_heads=1, num_bases=1, rank=0, query_rank=6)
    w = weights(randomise, mfa)
    own = w["mechanism"]
    latent = module(mfa, w).mechanism.query_input(jnp.asarray(X))
    close(latent, reference.rms(X @ own["query_down"], mfa.norm_epsilon))
    scaled = dataclasses.replace(mfa, latent_scale=True)
    close(module(scaled, w).mechanism.query_input(jnp.asarray(X)), 2 * latent)  # sqrt(24/6)


def test_reused_keys_without_their_gate_are_q_k_is_v(randomise):
    reused = MFAKRConfig(**COMMON, num_kv_heads=2, query_rank=5)
    w = changed(weights(randomise, reused), "value_gate", np.zeros(H))
    own = {k: v for k, v in w["mechanism"].items() if not k.startswith("value")}
    tied = GroupedConfig(**BOTH, num_kv_heads=2, num_bases=2, rank=0, tie="kv", query_rank=5)
    close(run(reused, w), run(tied, w | dict(mechanism=own)))


def test_gate_and_map_of_reused_keys_move_no_logit(randomise):
    reused = MFAKRConfig(**COMMON, num_kv_heads=1)
    w = weights(randomise, reused)
    for name, shape in (("value_gate", (H,)), ("value_map", (H, H))):
        other = changed(w, name, noise(shape))
        np.testing.assert_array_equal(logits(reused, other), logits(reused, w))
        assert moved(run(reused, other), run(reused, w), 2) == [True] * D
