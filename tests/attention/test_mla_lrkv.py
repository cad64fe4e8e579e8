"""LRKV over MLA's latent: what it is at its ends, and what residuals add."""

import numpy as np
import pytest

from kvjax.attention import MLAConfig
from tests.attention.one_layer import (
    LATENT,
    D,
    H,
    N,
    changed,
    close,
    heads,
    mla_lrkv_config,
    moved,
    noise,
    run,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")
OWN = ("latent_key", "latent_value", "expand_key", "expand_value")


def test_rank_0_is_mla(randomise):
    mla, config = MLAConfig(**LATENT), mla_lrkv_config(0)
    w = weights(randomise, mla)
    close(run(config, w), run(mla, w))
    assert config.entry() == mla.entry()


def test_residuals_of_zero_start_as_mla(randomise):
    config = mla_lrkv_config(3)
    w = weights(randomise, config)
    for name in ("expand_key", "expand_value"):
        w = changed(w, name, np.zeros_like(w["mechanism"][name]))
    own = {name: value for name, value in w["mechanism"].items() if name not in OWN}
    close(run(config, w), run(MLAConfig(**LATENT), w | dict(mechanism=own)))


def test_residuals_are_columns_of_a_latent_that_only_their_head_reads(
    randomise, without_latent_norms
):
    """MLA with one latent of C + 2NR channels and zeros where other heads' residuals are."""
    R, C = 2, LATENT["latent_dim"]
    config = mla_lrkv_config(R)
    w = weights(randomise, config)
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
    close(run(config, w), run(mla, w | dict(mechanism=own)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["key", "value"])
def test_a_residual_moves_its_own_head(randomise, kind):
    config = mla_lrkv_config(3)
    w = weights(randomise, config)
    latent = w["mechanism"][f"latent_{kind}"].copy()
    latent[:, 1] = noise(latent[:, 1].shape)
    other = heads(config, changed(w, f"latent_{kind}", latent))
    assert moved(other, heads(config, w), 2) == [n == 1 for n in range(N)]
