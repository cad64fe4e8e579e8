"""Initial weights of other authors' mechanisms."""

from flax import nnx
import numpy as np
import pytest

from kvjax.attention import GLAConfig, MFAKRConfig, MLAConfig, MLALRKVConfig, MLRAConfig
from tests import quick

D = 256
LATENT = dict(num_heads=8, key_dim=32, value_dim=32, latent_dim=64, rope_key_dim=16)


def _weights(config, seed=0):
    built = config.build(D, rngs=nnx.Rngs(seed))
    return {name: np.asarray(w) for name, w in nnx.to_pure_dict(nnx.state(built)).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        GLAConfig(**LATENT, num_latents=2),
        MLRAConfig(**LATENT, num_branches=2, num_latents=2),
    ],
)
def test_expansions_of_latents_start_by_the_latents_own_width(config):
    """1/sqrt(C) of one latent: not of all together, not of the heads that read it."""
    found = _weights(config)
    for name in ("up_key", "up_value"):
        assert np.std(found[name]) == pytest.approx(64**-0.5, rel=0.05)
    count = found["down"].size // D  # channels of all latents
    assert np.std(found["down"]) == pytest.approx(_linear(D, count), rel=0.05)


def _linear(fan_in, fan_out):
    return min(1.0, (fan_out / fan_in) ** 0.5) / fan_in**0.5


def test_mfa_kr_starts_with_keys_as_values():
    config = MFAKRConfig(num_heads=8, num_kv_heads=2, key_dim=32)
    found = _weights(config)
    assert not found["value_gate"].any() and found["value_map"].any()


@pytest.mark.parametrize(
    "residual_init, starts", quick.every(2, [("zeros", False), ("linear", True)])
)
def test_residuals_of_a_latent_start_as_asked(residual_init, starts):
    """Beside MLA's weights of the same seed."""
    config = MLALRKVConfig(**LATENT, rank=4, residual_init=residual_init)
    found, mla = _weights(config), _weights(MLAConfig(**LATENT))
    for name in mla:
        np.testing.assert_array_equal(found[name], mla[name])
    for name in ("expand_key", "expand_value"):
        assert found[name].any() == starts
    assert found["latent_key"].any() and found["latent_value"].any()
