"""Corpora of many small parts, and helpers for tests that prepare them."""

import pathlib

from kvjax.data import parts, pool, sources

PART = 1000  # bytes


def files(folder) -> dict[str, bytes]:
    """Returns the bytes of every file, by path."""
    folder = pathlib.Path(folder)
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def num_parts(config) -> int:
    """The number of parts of a corpus."""
    return len(parts.parts(config, sources.fingerprints(config)))


def noting(made):
    """A `pool.make_part` that appends the part's index to a list before it makes the part."""
    make_part = pool.make_part

    def make(config, part, *args, **kwargs):
        made.append(part.index)
        make_part(config, part, *args, **kwargs)

    return make
