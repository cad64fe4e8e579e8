"""Fixtures of attention: tiles smaller than a cache, mechanisms without norms of latents."""

import functools

import pytest

from kvjax.attention import mechanism, mla, shared_kv
from kvjax.kernels.decode_attention import api, xla
from tests.attention import law


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Registers an implementation "small_tiles" that reads a capacity of 128 as several tiles."""
    attend = functools.partial(xla.decode_attention, tile_kv=law.TILE_KV)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "small_tiles", attend)


@pytest.fixture
def without_latent_norms(monkeypatch):
    """Removes the norms of latents, without which some mechanisms are equal."""
    with_norm = mechanism.latent_norm

    def latent_norm(config, dim, axes, *, rngs):
        return with_norm(config, dim, axes, rngs=rngs) if axes == "H" else lambda x: x

    for where in (mechanism, mla, shared_kv):
        monkeypatch.setattr(where, "latent_norm", latent_norm)
