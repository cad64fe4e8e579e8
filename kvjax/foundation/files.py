"""File operations that work alike on local disks and in buckets."""

import errno
import fnmatch
import os
import stat

from etils import epath


def in_bucket(path: epath.PathLike) -> bool:
    """Returns True for paths in a bucket (gs://, s3://)."""
    return "://" in os.fspath(path)


def is_special(path: epath.PathLike) -> bool:
    """Returns True for pipes, sockets and devices; opening a pipe may block forever."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def size(path: epath.PathLike) -> int | None:
    """Returns the bytes of a file, or None if it does not exist."""
    try:
        return epath.Path(path).stat().length if in_bucket(path) else os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def matching_entries(folder: epath.Path, pattern: str) -> list[epath.Path]:
    """Returns a folder's visible entries that match a pattern, sorted; [] if it does not exist.

    Unlike etils' `glob`, brackets in the folder's own path are literal.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return []
        raise
    visible = [name for name in names if not name.startswith(".")]
    return [folder / name for name in sorted(fnmatch.filter(visible, pattern))]


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.parent / f".{path.name}.tmp"
    temporary.write_text(text)
    temporary.replace(path)


def unused(path: epath.Path) -> epath.Path:
    """Returns the path if nothing exists there, else the first free one of STEM-2, STEM-3, ...."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.parent / f"{path.stem}-{number}{path.suffix}"
    return candidate


def forget_listings(path: epath.Path) -> None:
    """Drops cached listings of a bucket, so that other processes' files become visible."""
    if in_bucket(path):
        epath.backend.fsspec_backend.fs(path).invalidate_cache()


def move(source: epath.Path, target: epath.Path) -> None:
    """Moves a file or folder, if it exists; in a bucket file by file."""
    if not in_bucket(source):
        if source.exists():
            source.rename(target)
        return
    if source.is_dir():
        for path in source.iterdir():
            move(path, target / path.name)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source.copy(target, overwrite=True)
        source.unlink()
