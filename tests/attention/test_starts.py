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
def test_up_projections_scale_by_the_width_of_one_latent(config):
    """The standard deviation is 1/sqrt(C), C of one latent, not of all latents together."""
    weights = _weights(config)
    for name in ("up_key", "up_value"):
        assert np.std(weights[name]) == pytest.approx(64**-0.5, rel=0.05)
    count = weights["down"].size // D  # channels of all latents
    assert np.std(weights["down"]) == pytest.approx(_linear(D, count), rel=0.05)


def _linear(fan_in, fan_out):
    return min(1.0, (fan_out / fan_in) ** 0.5) / fan_in**0.5


def test_mfa_kr_starts_with_keys_as_values():
    config = MFAKRConfig(num_heads=8, num_kv_heads=2, key_dim=32)
    weights = _weights(config)
    assert not weights["value_gate"].any() and weights["value_map"].any()


@pytest.mark.parametrize(
    "residual_init, starts", quick.every(2, [("zeros", False), ("linear", True)])
)
def test_residual_init_of_lrkv_over_mla(residual_init, starts):
    """MLA's weights are equal for equal seeds."""
    config = MLALRKVConfig(**LATENT, rank=4, residual_init=residual_init)
    weights, mla = _weights(config), _weights(MLAConfig(**LATENT))
    for name in mla:
        np.testing.assert_array_equal(weights[name], mla[name])
    for name in ("expand_key", "expand_value"):
        assert weights[name].any() == starts
    assert weights["latent_key"].any() and weights["latent_value"].any()
