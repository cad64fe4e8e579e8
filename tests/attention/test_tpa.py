"""TPA: factors that choose are GQA; what may be done to factors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import GroupedConfig
from tests import quick
from tests.attention.one_layer import (
    BOTH,
    D,
    N,
    X,
    close,
    module,
    positions,
    run,
    tpa_config,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("R", quick.only([2], [1, 2, N]))
def test_constant_head_factors_that_choose_are_gqa(randomise, R):
    """A constant channel of the input makes a = R·mask, where the mask says who reads which."""
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
    of_gqa = dict(query=own["query"], base_key=own["key_factor"], base_value=own["value_factor"])
    close(run(tpa, w | dict(mechanism=own), x=x), run(gqa, w | dict(mechanism=of_gqa), x=x))


def test_factors_can_be_doubled_scaled_and_permuted(randomise):
    tpa = tpa_config(2)
    w = weights(randomise, tpa)
    own, expected = w["mechanism"], run(tpa, w)
    names = ("key_head", "value_head", "key_factor", "value_factor")

    def along(name):
        return 2 if name.endswith("head") else 1

    twice = {name: np.concatenate([own[name]] * 2, axis=along(name)) for name in names}
    close(run(tpa_config(4), w | dict(mechanism=own | twice)), expected)  # a mean, not a sum
    permuted = {name: np.flip(own[name], axis=along(name)) for name in names}
    close(run(tpa, w | dict(mechanism=own | permuted)), expected)
    scaled = own | dict(key_head=own["key_head"] * 3, key_factor=own["key_factor"] / 3)
    close(run(tpa, w | dict(mechanism=scaled)), expected)


def test_factors_of_queries_can_be_doubled_scaled_and_permuted(randomise):
    """A mean of R_Q products; factors of values may be scaled against each other, too."""
    tpa = dataclasses.replace(tpa_config(2), query_factors=3)
    w = weights(randomise, tpa)
    own, expected = w["mechanism"], run(tpa, w)
    names = dict(query_head=2, query_factor=1)
    twice = {name: np.concatenate([own[name]] * 2, axis=axis) for name, axis in names.items()}
    six = dataclasses.replace(tpa, query_factors=6)
    close(run(six, w | dict(mechanism=own | twice)), expected)
    permuted = {name: np.flip(own[name], axis=axis) for name, axis in names.items()}
    close(run(tpa, w | dict(mechanism=own | permuted)), expected)
    scaled = {f"{of}_head": own[f"{of}_head"] * 3 for of in ("query", "value")}
    scaled |= {f"{of}_factor": own[f"{of}_factor"] / 3 for of in ("query", "value")}
    close(run(tpa, w | dict(mechanism=own | scaled)), expected)


def test_keys_of_a_token_have_the_rank_of_their_factors(randomise):
    tpa = tpa_config(2)
    mechanism = module(tpa, weights(randomise, tpa)).mechanism
    _, raw = mechanism.project(jnp.asarray(X), positions(tpa))
    k, _ = mechanism.keys_values(raw, positions(tpa))
    values = np.linalg.svd(np.asarray(k[0, 3]), compute_uv=False)
    assert values[1] > 0.01 and values[2] < 1e-12


def test_factors_that_are_rotated_are_keys_that_are(randomise):
    """And a normed key has a length of 1, read back from its factors."""
    tpa = tpa_config(2, qk_norm="rms")
    tpa = dataclasses.replace(tpa, norm_epsilon=0.0)
    mechanism = module(tpa, weights(randomise, tpa)).mechanism
    _, raw = mechanism.project(jnp.asarray(X), positions(tpa))
    entry = mechanism.encode(raw, positions(tpa))
    k = np.einsum("btnr,btrh->btnh", entry["key_head"], entry["key_factor"])
    close(np.mean(k**2, -1), 1.0)
    close(k, mechanism.keys_values(raw, positions(tpa))[0])
