"""Published orders against paired differences over seeds."""

import pytest

from experiments.analysis import seeds

MEASURED = {
    "high": {0: 9.0, 1: 9.1, 2: 9.2},
    "middle": {0: 9.1, 1: 9.05, 2: 9.2},
    "low": {0: 4.0, 1: 4.1, 2: 4.3},
    "lowest": {0: 5.0, 1: 5.1, 2: 5.3},
    "unpublished": {0: 1.0},
}
PUBLISHED = dict(low=50.0, high=90.0, lowest=40.0, middle=80.0, unmeasured=95.0)


def test_all_pairs_of_an_order():
    found = {(pair.first, pair.second): pair for pair in seeds.pairs(PUBLISHED, MEASURED)}
    assert list(found) == [
        *(("high", "middle"), ("high", "low"), ("high", "lowest")),
        *(("middle", "low"), ("middle", "lowest"), ("low", "lowest")),
    ]
    neighbours = [names for names, pair in found.items() if pair.neighbours]
    assert neighbours == [("high", "middle"), ("middle", "low"), ("low", "lowest")]
    verdicts = [found[names].verdict for names in neighbours]
    assert verdicts == ["not distinguishable", "as published", "the other way round"]
    assert found["high", "lowest"].published == 50.0
    assert found["low", "lowest"].here.mean == pytest.approx(-1.0)


def test_neighbours_in_words():
    said = seeds.in_words(seeds.pairs(PUBLISHED, MEASURED))
    assert said == (
        "not distinguishable: high over middle (-0.02 ± 0.19); as published: middle over low "
        "(+4.98 ± 0.26); the other way round: low over lowest (-1.00 ± 0.00)"
    )
