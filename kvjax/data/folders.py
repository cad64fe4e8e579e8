"""Folders of prepared data: there whole or not at all, and set aside if damaged."""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any
import uuid

from absl import logging
from etils import epath

from kvjax.data import manifest
from kvjax.foundation import progress
from kvjax.foundation.errors import DataError, UserError, warn
from kvjax.foundation.files import in_bucket, unused

STAGING = ".staging-kvjax-"
# A folder in which nothing was written for so long is what a killed preparation left.
ABANDONED_SECONDS = 24 * 3600


def is_whole(file: epath.Path, read: Callable[[epath.Path], Any]) -> bool:
    """Whether a folder is there as it was written; one that is damaged is set aside by name.

    Args:
      file: the one in it by which others know that all are there.
      read: raises a DamagedDataError if they are not.

    Raises:
      DamagedDataError: of a bucket's folder, which cannot be renamed.
    """
    folder = file.parent
    remote = in_bucket(folder)
    if not (file if remote else folder).exists():
        return False  # in a bucket a killed upload leaves a part, which the next one completes
    try:
        if not file.exists():
            raise manifest.DamagedDataError(folder, f"{file.name} is missing")
        read(folder)
        return True
    except manifest.DamagedDataError as error:
        if remote:
            raise
        aside = unused(folder.parent / f"{folder.name}.damaged")
        with contextlib.suppress(FileNotFoundError):  # another process was first
            folder.rename(aside)
            warn(
                f"{os.fspath(folder)} is damaged ({error.what}): set aside as {aside.name}, and "
                "made again"
            )
        return False


@contextlib.contextmanager
def writing(folder: epath.Path) -> Iterator[None]:
    """A folder that cannot be written, or has no room, as a message."""
    try:
        yield
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"prepared data cannot be written to {os.fspath(folder)}: {error.strerror or error}. "
            "Give config.data.directory, or set KVJAX_CACHE, to a folder that can be written and "
            "has room; what is done stays"
        ) from error


@contextlib.contextmanager
def published(file: epath.Path, shown: bool) -> Iterator[epath.Path]:
    """A local folder to write `file` and others into; without an exception it becomes `file`'s."""
    path = file.parent
    # ArrayRecord reads buckets but doesn't write them, and they can't rename a folder.
    remote = in_bucket(path)
    parent = epath.Path(tempfile.gettempdir()) if remote else path.parent
    staging = parent / f"{STAGING}{path.name}-{uuid.uuid4().hex}"
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(pathlib.Path(parent))
        staging.mkdir()
    try:
        yield staging
        if remote:
            with progress.waiting(f"uploading to {path}", shown=shown) as doing:
                _upload(pathlib.Path(staging), path, file.name, doing)
        else:
            rename(staging, file)
    finally:
        if staging.exists():
            staging.rmtree()


def rename(staging: epath.Path, file: epath.Path) -> None:
    """Makes a folder that is whole the one of `file`; another process may have been first."""
    try:
        staging.rename(file.parent)
    except OSError as error:
        if not file.exists():  # Otherwise another process was first, with the same content.
            raise DataError(
                f"{os.fspath(file.parent)} lacks {file.name}: remove that folder."
            ) from error


def _upload(staging: pathlib.Path, path: epath.Path, last: str, doing: progress.waiting) -> None:
    """Copies a folder; `last` is the file by which others know that all are there."""
    for file in sorted(staging.rglob("*"), key=lambda file: file.name == last):
        if file.is_file():
            target = path / file.relative_to(staging).as_posix()
            doing.now(f"uploading {target}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())


def is_abandoned(folder: pathlib.Path) -> bool:
    """Whether nothing was written in it for so long that its process must be gone."""
    try:
        newest = max(file.stat().st_mtime for file in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return False  # its process ended meanwhile
    return time.time() - newest > ABANDONED_SECONDS


def _remove_abandoned(folder: pathlib.Path) -> None:
    for staging in folder.glob(f"{STAGING}*"):
        if is_abandoned(staging):
            logging.info("removing %s, left by a preparation that was killed", staging)
            shutil.rmtree(staging, ignore_errors=True)
