"""What the law is tried with."""

import functools

import pytest

from kvjax.kernels.decode_attention import api
from kvjax.kernels.decode_attention import xla
from tests.attention import law


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Capacity 128 is several tiles, read by the implementation of this name."""
    attend = functools.partial(xla.decode_attention, block=law.BLOCK)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "small_tiles", attend)
