"""Methods that choose subspaces of keys: their tokens, ranks and moments."""

import numpy as np

from kvjax.analysis.measures import (
    activations,
    heads as heads_lib,
    key_drift,
    key_subspaces,
    subspace_methods,
)
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.measures.subspace_methods import AFTER, BEFORE
from tests.analysis import models


def test_fixed_subspaces_see_no_token_that_is_measured():
    tokens = {name: np.arange(200) + 1000 * i for i, name in enumerate("ab")}
    windows = subspace_methods.windows(tokens, 14, 32)
    assert windows.measured_BT.tolist() == [
        list(range(first, first + 15)) for first in (0, 15, 1000, 1015)
    ]
    assert (
        windows.texts_B.tolist() == [0, 0, 1, 1] and windows.texts_C.tolist() == [0] * 4 + [1] * 4
    )
    assert (windows.fixed_CT % 1000).min() >= 32  # drift is measured on the first 32
    assert windows.fixed_CT[:4, 0].tolist() == [
        32,
        74,
        116,
        158,
    ]  # evenly spaced over 12 possible rows
    assert windows.rows().shape == (4 + 8, 14) and windows.later
    assert windows.pools(0) == {
        subspace_methods.CALIBRATED: tuple(range(4, 12)),
        subspace_methods.OTHERS: tuple(range(8, 12)),
    }
    assert windows.pools(3)[subspace_methods.OTHERS] == tuple(range(4, 8))


def test_short_texts_have_fixed_subspaces_of_each_other():
    """A single text has no fixed subspaces; rows lose a token if the text has no last target."""
    tokens = {name: np.arange(32) + 1000 * i for i, name in enumerate("ab")}
    windows = subspace_methods.windows(tokens, 32, 32)
    assert windows.length == 31 and not windows.later
    np.testing.assert_array_equal(windows.fixed_CT, windows.measured_BT[:, :-1])
    assert windows.pools(0) == {subspace_methods.CALIBRATED: (3,)}
    assert subspace_methods.windows(dict(a=tokens["a"]), 15, 32).pools(0) == {}
    # A third row would not fit.
    assert len(subspace_methods.windows(tokens, 16, 32).measured_BT) == 2


def test_ranks_differ():
    def ranks(H):
        return [subspace_methods.rank(share, H) for share in subspace_methods.shares(H)]

    assert ranks(64) == [8, 16, 32, 48]
    assert ranks(8) == [1, 2, 4, 6]
    assert ranks(4) == [1, 2, 3]
    assert ranks(2) == [1] and subspace_methods.shares(2) == (0.5,)


def test_moments_of_queries_are_those_at_their_distances_from_keys():
    """Before RoPE moments are rotated by the distances; after RoPE each row is centred alone."""
    model = models.model(window=9)
    layer = next(activations.layers(model, np.stack(list(models.texts(20).values()))))
    rope = key_subspaces.rope_of(heads_lib.of_layer(model, 0))

    def chosen(x_BTNH):
        return x_BTNH[:, 3:12].astype(np.float64)

    moment_KHH = key_subspaces.moments(chosen(layer.plain_query_BTNH), 2)
    rotated_KHH = key_subspaces.rotated_moments(moment_KHH, rope, Mask(window=9), 9)
    after_KHH = key_subspaces.moments(chosen(layer.query_BTNH), 2)
    plain_BTKH, key_BTKH = chosen(layer.plain_key_BTKH), chosen(layer.key_BTKH)
    expected = {
        BEFORE: key_subspaces.of_text(rotated_KHH, plain_BTKH, each_row=False),
        AFTER: key_subspaces.of_text(after_KHH, key_BTKH, each_row=True),
    }
    for where, subspaces in expected.items():
        of_rows = subspace_methods.of_rows(layer, rope, where, [0, 1], slice(3, 12))
        np.testing.assert_allclose(of_rows.projectors(3), subspaces.projectors(3), rtol=1e-9)
    unrotated = key_subspaces.of_text(moment_KHH, plain_BTKH, each_row=False)
    assert np.abs(unrotated.projectors(3) - expected[BEFORE].projectors(3)).max() > 1e-2


def test_evenly_spaced_positions():
    assert key_drift.evenly_spaced(4, 16).tolist() == [2, 6, 10, 14]
    for t in (5, 16, 31):
        places = key_drift.evenly_spaced(t, 31)
        assert len(set(places.tolist())) == t and set(np.diff(places)) <= {31 // t, -(-31 // t)}


def test_ranks_have_at_least_twice_as_many_tokens():
    """Holds for drift, and for the first half of a context."""
    for channels, length in ((64, 1024), (64, 64), (128, 64), (8, 40), (64, 16), (4, 17)):
        r = key_drift.rank(channels, length)
        at = key_drift.prefix_lengths(length, r)
        assert at and min(at) >= 2 * r and max(at) == length // 2 and r <= channels / 4
    assert key_drift.rank(64, 1024) == 16 and key_drift.prefix_lengths(1024, 16) == (
        32,
        64,
        128,
        256,
        512,
    )
    windows = subspace_methods.windows({name: np.arange(64) for name in "ab"}, 31, 64)
    half = [
        r for r in range(1, 33) if windows.enough_tokens((subspace_methods.FIRST_HALF, AFTER), r)
    ]
    assert windows.length == 31 and max(half) == 7
    assert (
        max(r for r in range(99) if windows.enough_tokens((subspace_methods.CALIBRATED, AFTER), r))
        == 31
    )
    assert windows.enough_tokens((subspace_methods.CONTEXT, AFTER), 31)
