"""MLRA: branches are GLA with more heads, and are not MLA."""

import numpy as np
import pytest

from kvjax.attention import GLAConfig, MLAConfig
from tests import quick
from tests.attention.one_layer import (
    LATENT,
    D,
    H,
    N,
    changed,
    close,
    gla_config,
    heads,
    mlra_config,
    moved,
    noise,
    run,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("G, J", quick.only([(2, 2)], [(2, 2), (4, 1)]))
def test_branches_are_gla_with_more_heads(randomise, G, J):
    """MLRA is GLA of G·N heads: G times its queries, and its output projection over sqrt(G)."""
    mlra = mlra_config(G, J)
    w = weights(randomise, mlra)
    own = dict(w["mechanism"])
    for name in ("query", "rope_query"):
        own[name] = np.tile(own[name], (1, G, 1))
    own["down"] = own["down"].reshape(D, G * J, -1)
    for name in ("up_key", "up_value"):
        own[name] = own[name].reshape(G * J, *own[name].shape[2:])
    out = np.tile(w["out"], (G, 1, 1)) / np.sqrt(G)
    gla = GLAConfig(**LATENT | dict(num_heads=G * N), num_latents=G * J)
    close(run(mlra, w), run(gla, w | dict(mechanism=own, out=out)))


@pytest.mark.parametrize("J", quick.only([2], [1, 2]))
def test_one_branch_is_gla(randomise, J):
    mlra = mlra_config(1, J, qk_norm="rms_gain")
    w = weights(randomise, mlra)
    own = dict(w["mechanism"])
    own["down"] = own["down"][:, 0]
    for name in ("up_key", "up_value"):
        own[name] = own[name][0]
    own["latent_norm"] = dict(gain=own["latent_norm"]["gain"][0])
    close(run(mlra, w), run(gla_config(J, qk_norm="rms_gain"), w | dict(mechanism=own)))


def test_four_equal_branches_are_twice_one(randomise):
    one, four = mlra_config(1, 1), mlra_config(4, 1)
    w = weights(randomise, one)
    own = dict(w["mechanism"])
    own["down"] = np.repeat(own["down"], 4, axis=1)
    for name in ("up_key", "up_value"):
        own[name] = np.repeat(own[name], 4, axis=0)
    close(run(four, w | dict(mechanism=own)), 2 * run(one, w))


def test_branches_are_not_mla(randomise, without_latent_norms):
    """The sum over blocks of the key stands outside of the softmax."""
    mlra, mla = mlra_config(4, 1), MLAConfig(**LATENT | dict(latent_dim=24))
    w = weights(randomise, mlra)
    own = dict(w["mechanism"])
    own["down"] = own["down"].reshape(D, 24)
    for name in ("up_key", "up_value"):
        own[name] = own[name].reshape(24, N, H)
    assert np.abs(run(mlra, w) - run(mla, w | dict(mechanism=own))).max() > 0.01


@pytest.mark.slow
def test_a_latent_of_a_branch_moves_its_half_of_the_heads(randomise):
    mlra = mlra_config(2, 2)
    w = weights(randomise, mlra)
    down = w["mechanism"]["down"].copy()
    down[:, 0, 0] = noise((D, 6))
    other = heads(mlra, changed(w, "down", down))
    assert moved(other, heads(mlra, w), 2) == [True] * 2 + [False] * 2
