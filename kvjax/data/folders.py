"""Folders of prepared data, which appear only once they are complete and are renamed if damaged."""

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
# A temporary folder without a write for this long counts as left by a killed preparation.
ABANDONED_SECONDS = 24 * 3600


def is_whole(file: epath.Path, read: Callable[[epath.Path], Any]) -> bool:
    """Returns True if a folder is complete and undamaged; renames a damaged local folder.

    Args:
      file: the file in the folder that is written last.
      read: raises a DamagedDataError for a damaged folder.

    Raises:
      DamagedDataError: for a damaged folder in a bucket, which cannot be renamed.
    """
    folder = file.parent
    remote = in_bucket(folder)
    if not (file if remote else folder).exists():
        return False  # in a bucket, the next upload completes the files of a killed one
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
                f"{os.fspath(folder)} is damaged ({error.damage}): renamed to {aside.name}, and "
                "prepared again"
            )
        return False


@contextlib.contextmanager
def writing(folder: epath.Path) -> Iterator[None]:
    """Turns errors in writing to a folder into a UserError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"prepared data cannot be written to {os.fspath(folder)}: {error.strerror or error}. "
            "Set config.data.directory or KVJAX_CACHE to a writable folder with enough free space; "
            "finished parts stay"
        ) from error


@contextlib.contextmanager
def published(file: epath.Path, shown: bool) -> Iterator[epath.Path]:
    """Yields a temporary local folder; on success it becomes the folder of `file`."""
    path = file.parent
    # ArrayRecord cannot write to a bucket, and a bucket cannot rename a folder.
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
    """Renames a complete folder to the folder of `file`, unless another process was first."""
    try:
        staging.rename(file.parent)
    except OSError as error:
        if not file.exists():  # otherwise another process was first, with the same content
            raise DataError(
                f"{os.fspath(file.parent)} has no {file.name}: remove that folder."
            ) from error


def _upload(staging: pathlib.Path, path: epath.Path, last: str, doing: progress.waiting) -> None:
    """Copies a folder to a bucket, and `last`, which marks it as complete, at the end."""
    for file in sorted(staging.rglob("*"), key=lambda file: file.name == last):
        if file.is_file():
            target = path / file.relative_to(staging).as_posix()
            doing.now(f"uploading {target}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())


def is_abandoned(folder: pathlib.Path) -> bool:
    """Returns True if nothing was written in a folder for ABANDONED_SECONDS."""
    try:
        newest = max(file.stat().st_mtime for file in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return False  # just removed by its process
    return time.time() - newest > ABANDONED_SECONDS


def _remove_abandoned(folder: pathlib.Path) -> None:
    for staging in folder.glob(f"{STAGING}*"):
        if is_abandoned(staging):
            logging.info("removing %s, left by a preparation that was killed", staging)
            shutil.rmtree(staging, ignore_errors=True)
