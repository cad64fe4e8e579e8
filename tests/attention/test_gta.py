"""GTA: which channels are keys, values or both, and who reads them."""

import numpy as np
import pytest

from kvjax.attention import GroupedConfig
from tests.attention.one_layer import (
    BOTH,
    D,
    H,
    N,
    P,
    changed,
    close,
    gta_config,
    heads,
    logits,
    moved,
    noise,
    run,
    weights,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_without_a_rotated_key_keys_are_values(randomise):
    gta = gta_config(0, qk_norm="none")
    w = weights(randomise, gta)
    tied = GroupedConfig(**BOTH, num_kv_heads=2, num_bases=2, rank=0, tie="kv", qk_norm="none")
    own = dict(query=w["mechanism"]["query"], base_key=w["mechanism"]["latent"])
    close(run(gta, w), run(tied, w | dict(mechanism=own), base=None))


def test_the_last_channels_of_values_move_outputs_and_no_logit(randomise):
    gta = gta_config(P)
    w = weights(randomise, gta)
    latent = w["mechanism"]["latent"].copy()
    latent[:, :, H - P :] = noise((D, 2, P))
    other = changed(w, "latent", latent)
    np.testing.assert_array_equal(logits(gta, other), logits(gta, w))
    assert moved(heads(gta, other), heads(gta, w), 3) == [False] * (H - P) + [True] * P


def test_kv_heads_are_read_by_neighbours_and_the_rotated_key_by_all(randomise):
    gta = gta_config(P)
    w = weights(randomise, gta)
    assert gta.scale == H**-0.5
    latent = w["mechanism"]["latent"].copy()
    latent[:, 0] = noise((D, H))
    other = heads(gta, changed(w, "latent", latent))
    assert moved(other, heads(gta, w), 2) == [True] * 2 + [False] * 2
    other = changed(w, "rope_key", noise((D, P)))
    assert moved(heads(gta, other), heads(gta, w), 2) == [True] * N
