"""A fixture with blocks small enough for short rows."""

import pytest

from kvjax.kernels.softmax_attention import splash


@pytest.fixture
def small_blocks(monkeypatch):
    """Splash with blocks of 128, so that a short row has several."""
    monkeypatch.setattr(splash, "_divisor", lambda length, most: 128)
