"""Every token of a split cache has one slot on one chip, and chips hold about as many."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.stripes import Stripes


@pytest.mark.parametrize("chips, size", [(1, 512), (2, 8), (3, 4), (8, 8)])
def test_every_token_has_one_slot(chips, size):
    """Dealt in stripes; a chip's slots are in the order of positions."""
    slots = np.arange(3 * size)
    held = [Stripes(size, chips, chip) for chip in range(chips)]
    positions = [np.asarray(h.position(slots)) for h in held]
    assert sorted(np.concatenate(positions)) == list(range(3 * size * chips))
    if chips > 1:
        assert [int(p[0]) for p in positions] == [size * c for c in range(chips)]
        assert all(p[size] == p[0] + size * chips for p in positions)
    for tokens in range(3 * size * chips + 1):
        counts = [int(h.num_held(jnp.asarray(tokens))) for h in held]
        assert counts == [int(np.sum(p < tokens)) for p in positions]
        assert max(counts) - min(counts) <= size  # no chip waits for another by more
