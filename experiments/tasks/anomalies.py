"""Sets of images in which one is of another class (projection sharing, section A.3).

Images are features of a frozen network, read from a file, or synthetic: class means plus noise.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import pathlib
import zipfile
import zlib

import numpy as np

from kvjax.foundation.errors import DataError, MissingDataError

SIZE = 10  # images per set
PLACES = ("drawn", "last")
Part = tuple[np.ndarray, np.ndarray]  # features [N, F] and classes [N]


@dataclasses.dataclass(frozen=True)
class Features:
    """Training, validation and test images.

    Attributes:
      digest: digest of the file; the parameters of synthetic features.
    """

    train: Part
    validation: Part
    test: Part
    digest: str


def synthetic(
    noise: float, *, classes: int = 100, features: int = 512, per_class: int = 500
) -> Features:
    """Draws class means from N(0, 1) and images as mean plus noise.

    Args:
      noise: standard deviation in each of the features.
      per_class: training images of each class; there are a fifth as many test images.
    """
    rng = np.random.default_rng(42)
    means = rng.normal(size=(classes, features)).astype(np.float32)

    def part(count: int) -> Part:
        labels = np.repeat(np.arange(classes), count)
        noise_NF = rng.normal(scale=noise, size=(len(labels), features)).astype(np.float32)
        return means[labels] + noise_NF, labels

    train, test = part(per_class), part(per_class // 5)
    digest = f"made up: {classes} x {per_class} x {features}, {noise}"
    return Features(*held_out(train), test, digest)


def load(file: pathlib.Path) -> Features:
    """Reads an npz file with train [N, F], train_labels [N], test and test_labels.

    Raises:
      MissingDataError: there is no such file.
      DataError: an array is missing or malformed.
    """
    if not file.is_file():
        raise MissingDataError(
            f"{file} is missing: give an npz file of train [N, F], train_labels [N], test and "
            "test_labels, features of images such as a ResNet34's"
        )
    if not zipfile.is_zipfile(file):  # numpy also opens other files
        raise DataError(f"{file}: is not an npz file of arrays, as numpy.savez writes")
    try:
        with np.load(file) as arrays:
            by_name = dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: is not an npz file of arrays ({error})") from error

    def part(name: str) -> Part:
        keys = (name, f"{name}_labels")
        if absent := [key for key in keys if key not in by_name]:
            raise DataError(f"{file}: lacks {absent[0]!r}; it has {', '.join(by_name)}")
        x, y = (by_name[key] for key in keys)
        if x.ndim != 2 or x.dtype.kind != "f" or not np.isfinite(x).all():
            raise DataError(f"{file}: {name!r} must be finite real numbers [images, features]")
        if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise DataError(f"{file}: {keys[1]!r} must be {len(x)} whole numbers, one for each row")
        counts = np.unique(y, return_counts=True)[1]
        if len(counts) < 2 or min(counts) < SIZE:
            raise DataError(f"{file}: {name!r} needs two classes of {SIZE} images or more")
        return x.astype(np.float32), y

    train, test = part("train"), part("test")
    if train[0].shape[1] != test[0].shape[1]:
        raise DataError(
            f"{file}: {train[0].shape[1]} features to train on and {test[0].shape[1]} to test on"
        )
    return Features(*held_out(train), test, hashlib.sha256(file.read_bytes()).hexdigest())


def held_out(part: Part) -> tuple[Part, Part]:
    """Splits off a tenth of each class, at least SIZE images; returns (the rest, the tenth)."""
    x, y = part
    rng = np.random.default_rng(42)
    keep = np.zeros(len(y), bool)
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        keep[rows[max(SIZE, len(rows) // 10) :]] = True
    return (x[keep], y[keep]), (x[~keep], y[~keep])


def sets(part: Part, rng: np.random.Generator, place: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yields sets of SIZE image indices and the position of the anomaly in each.

    Every image is the anomaly once, among nine random images of one other class.

    Args:
      place: position of the anomaly: "drawn" uniformly, or "last" as in the course's code.
    """
    labels = part[1]
    images_of = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    classes = np.array(list(images_of))
    for image in rng.permutation(len(labels)):
        other = rng.choice(classes[classes != labels[image]])
        same_class = rng.choice(images_of[other], SIZE - 1, replace=False)
        position = SIZE - 1 if place == "last" else int(rng.integers(SIZE))
        yield np.insert(same_class, position, image), position


def batches(
    part: Part, rng: np.random.Generator, place: str, size: int, *, whole: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of features [B, SIZE, F] and anomaly positions [B].

    Args:
      whole: keep the last, smaller batch of an epoch.
    """
    rows, positions = [], []
    for row, position in sets(part, rng, place):
        rows.append(row)
        positions.append(position)
        if len(rows) == size:
            yield dict(x=part[0][np.stack(rows)], y=np.asarray(positions, np.int32))
            rows, positions = [], []
    if whole and rows:
        yield dict(x=part[0][np.stack(rows)], y=np.asarray(positions, np.int32))
