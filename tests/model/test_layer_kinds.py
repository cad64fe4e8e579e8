"""Patterns of layers' kinds."""

import itertools

import pytest

from kvjax.model.layer_kinds import LayerKind, patterns

KINDS = dict(a=LayerKind(None), b=LayerKind(1.0), c=LayerKind(2.0))


@pytest.mark.parametrize(
    "letters, layers_of_units, number",
    [
        ("aaaa", 1, 1),
        ("aaabaaab", 4, 1),
        ("aabaabaa", 4, 2),
        ("aaaabbb", 2, 2),
        ("abc", 3, 1),
        ("aaaaab" * 4 + "aa", 7, 2),
        ("aaaaab" * 10 + "aa", 7, 2),
        ("aaababab", 3, 2),  # the first pattern is repeated less often than it could be
        ("aa" + "aaaaab" * 21, 7, 2),
        ("aaaaab" * 200 + "aa", 7, 2),  # more layers than Python's stack has frames
        ("", 0, 0),
    ],
)
def test_patterns(letters, layers_of_units, number):
    """They have as few layers as possible, and join to all layers."""
    kinds = tuple(map(KINDS.get, letters))
    found = patterns(kinds)
    assert sum((pattern.unit * pattern.repeats for pattern in found), ()) == kinds
    assert sum(pattern.num_layers for pattern in found) == len(kinds)
    assert sum(len(pattern.unit) for pattern in found) == layers_of_units
    assert len(found) == number


def test_no_split_is_smaller():
    """Compares with every split of every short sequence of two kinds."""

    def unit(layers):
        sizes = (size for size in range(1, len(layers) + 1) if len(layers) % size == 0)
        return next(size for size in sizes if layers[:size] * (len(layers) // size) == layers)

    def smallest(letters):
        inner = range(1, len(letters))
        cuts = itertools.chain.from_iterable(
            itertools.combinations(inner, number) for number in range(len(letters))
        )
        bounds = ((0, *cut, len(letters)) for cut in cuts)
        parts = ([letters[i:j] for i, j in itertools.pairwise(bound)] for bound in bounds)
        return min((sum(map(unit, split)), len(split)) for split in parts)

    for letters in itertools.product("ab", repeat=7):
        found = patterns(tuple(map(KINDS.get, letters)))
        assert (sum(len(p.unit) for p in found), len(found)) == smallest(letters), letters
