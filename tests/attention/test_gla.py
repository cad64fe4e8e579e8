"""GLA: MLA is its case of one latent; which heads a latent moves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import MLAConfig, MLRAConfig
from tests import quick
from tests.attention.one_layer import (
    LATENT,
    D,
    H,
    N,
    P,
    X,
    changed,
    close,
    gla_config,
    heads,
    module,
    moved,
    noise,
    positions,
    run,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("query_rank", quick.only([5], [0, 5]))
def test_one_latent_is_mla(randomise, query_rank):
    options = dict(qk_norm="rms_gain", latent_scale=True, query_rank=query_rank)
    mla, gla = MLAConfig(**LATENT, **options), gla_config(1, **options)
    w = weights(randomise, mla)
    own = dict(w["mechanism"])
    own["down"] = own["down"][:, None]
    for name in ("up_key", "up_value"):
        own[name] = own[name][None]
    own["latent_norm"] = dict(gain=own["latent_norm"]["gain"][None])
    close(run(gla, w | dict(mechanism=own)), run(mla, w))


def test_groups_are_mla_with_zeros_but_for_norms(randomise, without_latent_norms):
    gla = gla_config(2)
    w = weights(randomise, gla)
    own = dict(w["mechanism"])
    own["down"] = own["down"].reshape(D, -1)
    for name in ("up_key", "up_value"):
        up = np.zeros((2, 6, N, H))
        for j in range(2):
            up[j, :, 2 * j : 2 * j + 2] = own[name][j]
        own[name] = up.reshape(12, N, H)
    mla = MLAConfig(**LATENT | dict(latent_dim=12))
    close(run(gla, w), run(mla, w | dict(mechanism=own)))


def test_a_latent_moves_its_own_heads_and_the_rotated_key_all(randomise):
    """Groups are neighbours: heads 0 and 1, not 0 and 2."""
    gla = gla_config(2)
    w = weights(randomise, gla)
    down = w["mechanism"]["down"].copy()
    down[:, 0] = noise((D, 6))
    assert moved(heads(gla, changed(w, "down", down)), heads(gla, w), 2) == [True] * 2 + [False] * 2
    other = changed(w, "rope_key", noise((D, P)))
    assert moved(heads(gla, other), heads(gla, w), 2) == [True] * N


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [gla_config(2), MLRAConfig(**LATENT, num_branches=2, num_latents=2)]
)
def test_scales_are_of_whole_keys_and_of_a_latents_own_width(randomise, config):
    assert config.scale == (H + P) ** -0.5
    w = weights(randomise, config)

    def of(config):
        return module(config, w).mechanism.project(jnp.asarray(X), positions(config))[1]

    scaled = dataclasses.replace(config, latent_scale=True)
    close(
        of(scaled)["latent"], 2 * of(config)["latent"]
    )  # sqrt(24/6), not of all latents' 12 or 24
