"""Shared KV: only relative positions count, though values are rotated."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import GroupedConfig
from tests import reference
from tests.attention.one_layer import (
    BOTH,
    P,
    X,
    close,
    compiled_anew,
    module,
    positions,
    run,
    shared_kv_config,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_only_relative_positions_count(randomise, monkeypatch):
    """Values are rotated too: without the turn back they would tell where they stood."""
    shared = shared_kv_config(P)
    w = weights(randomise, shared)
    close(run(shared, w, first=70), run(shared, w))
    from kvjax.attention import shared_kv

    monkeypatch.setattr(shared_kv.SharedKV, "combine", lambda self, o, positions: o)
    with compiled_anew():
        assert np.abs(run(shared, w, first=70) - run(shared, w)).max() > 0.01


def test_without_rotation_values_are_normed_keys(randomise):
    shared = shared_kv_config(0)
    w = weights(randomise, shared)
    mechanism = module(shared, w).mechanism
    _, raw = mechanism.project(jnp.asarray(X), positions(shared))
    k, v = mechanism.keys_values(raw, positions(shared))
    close(k, v)
    expected = np.einsum("btd,dkh->btkh", X, w["mechanism"]["latent"])
    close(k, reference.rms(expected, shared.norm_epsilon))
    close(run(shared, w), run(shared, w, base=None))
    assert list(shared.entry()) == ["latent"]


def test_without_rotation_it_is_tied_values(randomise, without_latent_norms):
    """Projection sharing's Q-K=V, where neither norms anything."""
    shared = dataclasses.replace(shared_kv_config(0), qk_norm="none")
    w = weights(randomise, shared)
    own = dict(w["mechanism"])
    K = shared.num_kv_heads
    counts = dict(num_kv_heads=K, num_bases=K, rank=0, qk_norm="none")
    tied = GroupedConfig(**BOTH, **counts, tie="kv")
    as_tied = dict(query=own["query"], base_key=own["latent"])
    close(run(shared, w, base=None), run(tied, w | dict(mechanism=as_tied), base=None))
