"""What the law is tried with."""

import functools

import pytest

from kvjax.attention import gla, mechanism, mla, shared_kv
from kvjax.kernels.decode_attention import api, xla
from tests.attention import law


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Capacity 128 is several tiles, read by the implementation of this name."""
    attend = functools.partial(xla.decode_attention, tile_kv=law.TILE_KV)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "small_tiles", attend)


@pytest.fixture
def without_latent_norms(monkeypatch):
    """Latents are not normed: for mechanisms that are equal to others but for that norm."""
    for where in (mechanism, gla, mla, shared_kv):
        monkeypatch.setattr(where, "latent_norm", lambda *args, **options: lambda x: x)
