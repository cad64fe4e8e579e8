"""Files with one flipped bit: whoever reads one must refuse it, or read what was written."""

from collections.abc import Iterator
import pathlib
import random


def flipped(content: bytes, step: int = 1) -> Iterator[bytes]:
    """Contents that differ by one bit, one in `step`; an odd step flips bits of all weights."""
    for place in range(0, 8 * len(content), step):
        yield _flip(content, place)


def flips(files: list[pathlib.Path], count: int, seed: int = 0) -> Iterator[pathlib.Path]:
    """Flips a bit of a file, gives the file, and mends it; `count` times, every file alike."""
    rng = random.Random(seed)
    for i in range(count):
        file = files[i % len(files)]
        whole = file.read_bytes()
        file.write_bytes(_flip(whole, rng.randrange(8 * len(whole))))
        yield file
        file.write_bytes(whole)


def _flip(content: bytes, place: int) -> bytes:
    broken = bytearray(content)
    broken[place // 8] ^= 1 << place % 8
    return bytes(broken)
