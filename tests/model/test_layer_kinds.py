"""Patterns of layers' kinds."""

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
