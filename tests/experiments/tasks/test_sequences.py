"""The synthetic tasks, as the papers define them."""

import numpy as np
import pytest

from experiments.tasks import sequences

ROW = np.array([[3, 1, 4, 1]])


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("reverse", [1, 4, 1, 3]),
        ("sort", [1, 1, 3, 4]),
        ("sub", [6, 8, 5, 8]),
        ("swap", [4, 1, 3, 1]),
        ("copy", [3, 1, 4, 1]),
    ],
)
def test_labels_of_the_five_tasks(task, expected):
    assert sequences.TASKS[task](ROW).tolist() == [expected]


def test_rows_are_drawn_uniformly_and_by_their_seed():
    x, y = sequences.labelled("sort", 5000, 16, seed=0)
    assert x.shape == y.shape == (5000, 16) and x.dtype == np.int32
    assert np.abs(np.bincount(x.ravel()) / x.size - 0.1).max() < 0.005
    assert np.array_equal(x, sequences.labelled("copy", 5000, 16, seed=0)[0])
    assert not np.array_equal(x, sequences.labelled("copy", 5000, 16, seed=1)[0])
    with pytest.raises(ValueError, match="length = 5: must be even"):
        sequences.labelled("swap", 2, 5, seed=0)


@pytest.mark.parametrize("periodic", [False, True])
def test_copy_back(periodic):
    x, y, counts = sequences.copy_back(np.random.default_rng(0), 50, periodic=periodic).values()
    assert x.shape == (50, 64) and x.min() == 0 and x.max() == 15
    back = 7 if periodic else 8  # distance from a token to the one 8 before its label
    assert np.array_equal(y[:, back:], x[:, :-back])
    assert counts.sum(axis=1).tolist() == [64 - back] * 50 and not counts[:, :back].any()
    # The authors' task is easier: any earlier period has the label. The token itself does not.
    assert np.array_equal(y[:, back + 8 :], x[:, : -back - 8]) == periodic
    assert np.mean(x[counts] == y[counts]) < 0.2


@pytest.mark.parametrize("keys", [8, 16, 64])
def test_retrieval(keys):
    x, y, counts = sequences.retrieval(np.random.default_rng(0), 200, keys=keys).values()
    assert x.shape == (200, 18) and (counts.sum(axis=1) == 1).all() and counts[:, -1].all()
    asked, values = x[:, 0:16:2], x[:, 1:16:2]
    assert all(len(set(row)) == 8 for row in asked.tolist()) and asked.max() < keys
    assert values.min() >= keys and values.max() < 2 * keys
    assert (x[:, -2] == 2 * keys).all()
    place = np.argmax(asked == x[:, -1:], axis=1)
    assert (asked[np.arange(200), place] == x[:, -1]).all()
    assert (values[np.arange(200), place] == y[:, -1]).all()
    assert len(set(place.tolist())) == 8  # all pairs occur as queries
