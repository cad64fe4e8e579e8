"""Special cases in which two mechanisms are equal, as their papers claim."""

import dataclasses

import numpy as np
import pytest

from kvjax.attention import GLAConfig, GroupedConfig, MFAKRConfig, MLAConfig
from tests import quick
from tests.attention.one_layer import (
    BOTH,
    COMMON,
    LATENT,
    D,
    H,
    N,
    P,
    X,
    changed,
    close,
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


def _with_mechanism(w, **own):
    """Replaces all weights of the mechanism."""
    return w | dict(mechanism=own)


def _without(own, *prefixes):
    return {name: value for name, value in own.items() if not name.startswith(prefixes)}


def test_gla_is_mla_with_block_diagonal_up_projections(randomise, without_latent_norms):
    """Heads 0 and 1 read latent 0, heads 2 and 3 latent 1."""
    w = weights(randomise, gla_config(2))
    own = dict(w["mechanism"])
    own["down"] = own["down"].reshape(D, -1)
    for name in ("up_key", "up_value"):
        up = np.zeros((2, 6, N, H))
        for j in range(2):
            up[j, :, 2 * j : 2 * j + 2] = own[name][j]
        own[name] = up.reshape(12, N, H)
    mla = MLAConfig(**LATENT | dict(latent_dim=12))
    close(run(gla_config(2), w), run(mla, _with_mechanism(w, **own)))


@pytest.mark.parametrize("G, J", quick.only([(2, 2)], [(2, 2), (4, 1)]))
def test_mlra_is_gla_with_more_heads(randomise, G, J):
    """G·N heads: G times the queries, and the output projection over sqrt(G)."""
    w = weights(randomise, mlra_config(G, J))
    own = dict(w["mechanism"])
    for name in ("query", "rope_query"):
        own[name] = np.tile(own[name], (1, G, 1))
    own["down"] = own["down"].reshape(D, G * J, -1)
    for name in ("up_key", "up_value"):
        own[name] = own[name].reshape(G * J, *own[name].shape[2:])
    out = np.tile(w["out"], (G, 1, 1)) / np.sqrt(G)
    gla = GLAConfig(**LATENT | dict(num_heads=G * N), num_latents=G * J)
    close(run(mlra_config(G, J), w), run(gla, _with_mechanism(w, **own) | dict(out=out)))


def test_gta_without_a_rope_key_is_tied_values(randomise):
    gta = gta_config(0, qk_norm="none")
    w = weights(randomise, gta)
    tied = GroupedConfig(**BOTH, num_kv_heads=2, num_bases=2, rank=0, tie="kv", qk_norm="none")
    own = dict(query=w["mechanism"]["query"], base_key=w["mechanism"]["latent"])
    close(run(gta, w), run(tied, _with_mechanism(w, **own), base=None))


def test_residuals_are_columns_of_a_latent_that_only_their_head_reads(
    randomise, without_latent_norms
):
    """LRKV over MLA is MLA with C + 2NR channels, zeros where other heads' residuals are."""
    R, C = 2, LATENT["latent_dim"]
    w = weights(randomise, mla_lrkv_config(R))
    own = dict(w["mechanism"])
    latents, expand_key, latent_value, expand_value = (
        own.pop(name) for name in ("latent_key", "expand_key", "latent_value", "expand_value")
    )
    own["down"] = np.concatenate(
        [own["down"], latents.reshape(D, N * R), latent_value.reshape(D, N * R)], axis=1
    )
    up_key, up_value = np.zeros((2, C + 2 * N * R, N, H))
    up_key[:C], up_value[:C] = own["up_key"], own["up_value"]
    for n in range(N):
        up_key[C + n * R : C + (n + 1) * R, n] = expand_key[n]
        up_value[C + (N + n) * R : C + (N + n + 1) * R, n] = expand_value[n]
    own |= dict(up_key=up_key, up_value=up_value)
    mla = MLAConfig(**LATENT | dict(latent_dim=C + 2 * N * R))
    close(run(mla_lrkv_config(R), w), run(mla, _with_mechanism(w, **own)))


def test_low_rank_queries_without_norm_are_dense_queries(randomise, without_latent_norms):
    """Without the norm MFA is MQA."""
    mfa = GroupedConfig(**BOTH, num_kv_heads=1, num_bases=1, rank=0, query_rank=5)
    w = weights(randomise, mfa)
    own = w["mechanism"]
    dense = np.einsum("dc,cnh->dnh", own["query_down"], own["query"])
    mqa = dataclasses.replace(mfa, query_rank=0)
    close(run(mfa, w), run(mqa, _with_mechanism(w, **_without(own, "query"), query=dense)))


def test_mfa_kr_with_a_gate_of_zero_is_tied_values(randomise):
    reused = MFAKRConfig(**COMMON, num_kv_heads=2, query_rank=5)
    w = changed(weights(randomise, reused), "value_gate", np.zeros(H))
    tied = GroupedConfig(**BOTH, num_kv_heads=2, num_bases=2, rank=0, tie="kv", query_rank=5)
    close(run(reused, w), run(tied, _with_mechanism(w, **_without(w["mechanism"], "value"))))


def test_shared_kv_depends_on_relative_positions_alone(randomise):
    """Values are rotated too, and outputs rotated back."""
    shared = shared_kv_config(P)
    w = weights(randomise, shared)
    close(run(shared, w, first=70), run(shared, w))


def test_shared_kv_without_rotation_is_tied_values(randomise, without_latent_norms):
    """Projection sharing's Q-K=V, without norms."""
    shared = shared_kv_config(0, qk_norm="none")
    w = weights(randomise, shared)
    own = w["mechanism"]
    tied = GroupedConfig(**BOTH, num_kv_heads=2, num_bases=2, rank=0, tie="kv", qk_norm="none")
    as_tied = _with_mechanism(w, query=own["query"], base_key=own["latent"])
    close(run(shared, w), run(tied, as_tied, base=None))


@pytest.mark.parametrize("R", quick.only([2], [1, 2, N]))
def test_tpa_with_constant_head_factors_is_gqa(randomise, R):
    """A constant channel of the input makes a = R·mask; the mask assigns heads to factors."""
    tpa = tpa_config(R)
    w = weights(randomise, tpa)
    own = dict(w["mechanism"])
    x = X.copy()
    x[..., 0] = 1.0
    mask = np.zeros((D, N, R))
    for n in range(N):
        mask[0, n, n * R // N] = R
    own["key_head"] = own["value_head"] = mask
    gqa = GroupedConfig(**BOTH, num_kv_heads=R, num_bases=R, rank=0, qk_norm="none")
    gqa_weights = dict(
        query=own["query"], base_key=own["key_factor"], base_value=own["value_factor"]
    )
    close(
        run(tpa, _with_mechanism(w, **own), x=x), run(gqa, _with_mechanism(w, **gqa_weights), x=x)
    )
