"""Checks beforehand that output files can be written; saves elsewhere if writing fails later."""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import os
import pathlib
import tempfile

from etils import epath

from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import in_bucket, is_special


def check(out: str, names: Iterable[str], option: str = "--out") -> epath.Path:
    """Returns the folder that an option names, after test-writing its files.

    Args:
      names: names of the files to write there.

    Raises:
      UserError: a file cannot be written there.
    """
    path = runtime.folder(option, out)
    if not in_bucket(path):
        try_files(f"{option} = {out!r}", path, names)
    return path


def check_file(option: str, text: str) -> epath.Path:
    """Returns the file that an option names, with links resolved, after test-writing it.

    Raises:
      UserError: the file cannot be written, or is a folder.
    """
    path = runtime.path(option, text)
    if not in_bucket(path):
        path = epath.Path(os.path.realpath(path))
        runtime.folder(option, path.parent)
        try_files(f"{option} = {text!r}", path.parent, [path.name])
    return path


def try_files(where: str, path: epath.Path, names: Iterable[str]) -> None:
    """Raises a UserError unless files of a folder can be written; changes nothing.

    Args:
      where: option and value, for messages.
    """
    for name in names:
        if os.path.isdir(path / name):
            raise UserError(f"{where}: {name} is a folder: give another, or move it")
        if is_special(path / name):
            raise UserError(f"{where}: {name} is a pipe or device: give another")
    new = _missing(path)
    existing = next(parent for parent in (path, *path.parents) if parent not in new)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in names:
            with contextlib.suppress(FileExistsError):  # another process writes it
                with open(_temporary(path / name), "x"):
                    os.unlink(_temporary(path / name))
    except OSError as error:
        reason = f"nothing can be created in {existing} ({error.strerror or error})"
        raise UserError(f"{where}: cannot be written: {reason}") from error
    finally:
        _remove(new)


def _temporary(path: epath.Path) -> epath.Path:
    return path.parent / f".{path.name}.tmp"


def _missing(path: epath.Path) -> list[epath.Path]:
    """Returns the missing folders of a path, deepest first."""
    return [parent for parent in (path, *path.parents) if not parent.exists()]


def _remove(folders: Iterable[epath.Path]) -> None:
    """Removes folders that are empty."""
    for path in folders:
        with contextlib.suppress(OSError):
            os.rmdir(path)


@contextlib.contextmanager
def folder(path: epath.Path) -> Iterator[None]:
    """Creates a folder for the block; removes it again if the block fails.

    Raises:
      UserError: the folder cannot be created.
    """
    new = [] if in_bucket(path) else _missing(path)
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"--out: {path} cannot be created: {reason}") from error
        yield
    except BaseException:
        _remove(new)
        raise


def write(target: epath.Path, files: Mapping[str, bytes], option: str = "--out") -> None:
    """Writes files into a folder, each whole or not at all.

    Raises:
      UserError: writing failed; names the place where the files were written instead.
    """
    temporary = {target / name: _temporary(target / name) for name in files}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, content in zip(temporary.values(), files.values(), strict=True):
            path.write_bytes(content)
        for path, written in temporary.items():
            written.replace(path)
    except Exception as error:  # bucket clients raise their own types
        raise UserError(
            f"{option}: {target} cannot be written ({first_line(error)}). {elsewhere(files)}"
        ) from error
    finally:
        for path in temporary.values():
            with contextlib.suppress(Exception):  # the first failure is reported
                path.unlink(missing_ok=True)


def elsewhere(files: Mapping[str, bytes]) -> str:
    """Writes files into a new temporary folder; returns a sentence with their paths."""
    try:
        rescue = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-"))
        for name, content in files.items():
            (rescue / name).write_bytes(content)
    except OSError as error:
        return f"Nor can anything be written to {tempfile.gettempdir()}: {error.strerror}"
    return f"Nothing is lost: {', '.join(str(rescue / name) for name in files)}"
