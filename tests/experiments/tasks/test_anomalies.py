"""Sets with one image of another class: anomalies, batches, and files of features."""

import numpy as np
import pytest

from experiments.tasks import anomalies
from kvjax.foundation.errors import DataError, MissingDataError


@pytest.fixture(scope="module")
def features():
    return anomalies.synthetic(1.0, classes=5, features=8, per_class=50)


@pytest.mark.parametrize("place", anomalies.PLACES)
def test_sets_have_one_image_of_another_class(features, place):
    labels = features.train[1]
    seen, places = [], []
    for row, at in anomalies.sets(features.train, np.random.default_rng(0), place):
        others = np.delete(row, at)
        assert len(row) == 10 and len(set(others.tolist())) == 9
        assert len(set(labels[others])) == 1 and labels[row[at]] != labels[others[0]]
        seen.append(row[at])
        places.append(at)
    assert sorted(seen) == list(range(len(labels)))  # every image once
    assert set(places) == ({9} if place == "last" else set(range(10)))


def test_batches_hold_the_features_of_their_sets(features):
    def rng():
        return np.random.default_rng(1)

    batch = next(anomalies.batches(features.train, rng(), "drawn", 4))
    sets = anomalies.sets(features.train, rng(), "drawn")
    for x, at in zip(batch["x"], batch["y"], strict=True):
        row, expected = next(sets)
        assert at == expected and np.array_equal(x, features.train[0][row])


def test_the_last_batch_of_an_epoch(features):
    def sizes(**how):
        return [
            len(batch["y"])
            for batch in anomalies.batches(
                features.test, np.random.default_rng(1), "last", 20, **how
            )
        ]

    assert sizes() == [20, 20] and sizes(whole=True) == [20, 20, 10]


def test_a_tenth_of_each_class_is_held_out(features):
    for label in range(5):
        counts = [int((part[1] == label).sum()) for part in (features.train, features.validation)]
        assert counts == [40, 10]  # a set needs ten
    assert len(features.test[1]) == 50
    both = np.concatenate([features.train[0], features.validation[0]])
    assert len(np.unique(both, axis=0)) == 250
    spread = [
        features.train[0][features.train[1] == label].std(axis=0).mean() for label in range(5)
    ]
    assert 0.8 < np.mean(spread) < 1.1


def _arrays(**changed):
    labels = np.repeat(np.arange(3), 20)
    x = np.random.default_rng(0).normal(size=(60, 4))
    return dict(train=x, train_labels=labels, test=x, test_labels=labels) | changed


def test_features_from_a_file(tmp_path):
    file = tmp_path / "features.npz"
    np.savez(file, **_arrays())
    found = anomalies.load(file)
    assert found.train[0].shape == (30, 4) and found.validation[0].shape == (30, 4)
    assert found.test[0].dtype == np.float32 and len(found.digest) == 64


_NAN = np.random.default_rng(0).normal(size=(60, 4))
_NAN[7, 2] = np.nan


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(train=np.ones((60, 4), int)), "'train' must be finite real numbers"),
        (dict(train=_NAN), "'train' must be finite real numbers"),
        (dict(test_labels=np.zeros(3, int)), "'test_labels' must be 60 whole numbers"),
        (dict(test_labels=np.zeros(60, int)), "needs two classes of 10 images or more"),
        (dict(train_labels=np.arange(60)), "needs two classes of 10 images or more"),
        (dict(test=np.ones((60, 5))), "4 features to train on and 5 to test on"),
        (dict(train=np.array([dict()])), "is not an npz file of arrays"),
    ],
)
def test_files_of_other_forms_are_named(tmp_path, changed, message):
    file = tmp_path / "features.npz"
    np.savez(file, **_arrays(**changed))
    with pytest.raises(DataError, match=message) as error:
        anomalies.load(file)
    assert "features.npz" in str(error.value)


def test_missing_or_damaged_files_are_named(tmp_path):
    file = tmp_path / "features.npz"
    with pytest.raises(MissingDataError, match=r"train \[N, F\], train_labels"):
        anomalies.load(file)
    file.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match="is not an npz file"):
        anomalies.load(file)
    with file.open("wb") as one:  # NumPy would open it as one array
        np.save(one, _arrays()["train"])
    with pytest.raises(DataError, match="is not an npz file"):
        anomalies.load(file)
    np.savez_compressed(file, **_arrays())
    data = file.read_bytes()
    file.write_bytes(data[:200] + b"\xff" * 400 + data[600:])
    with pytest.raises(DataError, match="is not an npz file"):
        anomalies.load(file)
    np.savez(file, **{k: v for k, v in _arrays().items() if k != "test"})
    with pytest.raises(DataError, match="lacks 'test'; it has train, train_labels"):
        anomalies.load(file)
