"""Files with one flipped bit: a reader must refuse the file, or read what was written."""

from collections.abc import Iterator
import pathlib
import random


def flipped(content: bytes, step: int = 1) -> Iterator[bytes]:
    """Yields contents with one bit flipped, every `step`-th; an odd step reaches bits 0 to 7."""
    for bit in range(0, 8 * len(content), step):
        yield _flip(content, bit)


def flips(files: list[pathlib.Path], count: int, seed: int = 0) -> Iterator[pathlib.Path]:
    """Flips a random bit of a file, yields the file, and restores it; `count` times, in turn."""
    rng = random.Random(seed)
    for i in range(count):
        file = files[i % len(files)]
        content = file.read_bytes()
        file.write_bytes(_flip(content, rng.randrange(8 * len(content))))
        yield file
        file.write_bytes(content)


def _flip(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
