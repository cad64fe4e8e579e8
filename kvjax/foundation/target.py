"""Files and folders that a command is asked to write: tried before its work, not lost after it."""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import os
import pathlib
import tempfile

from etils import epath

from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import in_bucket, special


def check(out: str, names: Iterable[str], option: str = "--out") -> epath.Path:
    """Returns the folder that an option names, after trying to make it and its files.

    Args:
      names: of the files that are to be written there.

    Raises:
      UserError: they cannot be.
    """
    path = runtime.folder(option, out)
    if not in_bucket(path):
        try_files(f"{option} = {out!r}", path, names)
    return path


def check_file(option: str, text: str) -> epath.Path:
    """Returns the file that an option names, links followed, after trying to make it.

    Raises:
      UserError: it cannot be written, or is a folder.
    """
    path = runtime.path(option, text)
    if not in_bucket(path):
        path = epath.Path(os.path.realpath(path))
        runtime.folder(option, path.parent)
        try_files(f"{option} = {text!r}", path.parent, [path.name])
    return path


def try_files(given: str, path: epath.Path, names: Iterable[str]) -> None:
    """Raises a UserError unless these files can be written; leaves what is there as it is."""
    for name in names:
        if os.path.isdir(path / name):
            raise UserError(f"{given}: {name} is a folder there: give another, or move it")
        if kind := special(path / name):
            raise UserError(f"{given}: {name} is {kind}: give another")
    new = _missing(path)
    last = next(one for one in (path, *path.parents) if one not in new)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in names:
            with contextlib.suppress(FileExistsError):  # another process writes it
                with open(_temporary(path / name), "x"):
                    os.unlink(_temporary(path / name))
    except OSError as error:
        why = f"nothing can be made in {last} ({error.strerror or error})"
        raise UserError(f"{given}: cannot be written: {why}") from error
    finally:
        _remove(new)


def _temporary(path: epath.Path) -> epath.Path:
    return path.parent / f".{path.name}.tmp"


def _missing(path: epath.Path) -> list[epath.Path]:
    """Returns the folders of a path that are not there, the deepest first."""
    return [one for one in (path, *path.parents) if not one.exists()]


def _remove(folders: Iterable[epath.Path]) -> None:
    """Removes folders, but those that are not there or in which somebody else wrote."""
    for one in folders:
        with contextlib.suppress(OSError):
            os.rmdir(one)


@contextlib.contextmanager
def folder(path: epath.Path) -> Iterator[None]:
    """Makes a folder before it is needed; it is gone again where the block fails.

    Raises:
      UserError: it cannot be made.
    """
    new = [] if in_bucket(path) else _missing(path)
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: {path} cannot be made: {error.strerror or error}") from error
        yield
    except BaseException:
        _remove(new)
        raise


def write(target: epath.Path, files: Mapping[str, bytes], option: str = "--out") -> None:
    """Writes files into a folder, each whole or not at all: somebody may look.

    Raises:
      UserError: they cannot be written there; says where they were written instead.
    """
    temporary = {target / name: _temporary(target / name) for name in files}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, content in zip(temporary.values(), files.values(), strict=True):
            path.write_bytes(content)
        for path, written in temporary.items():
            written.replace(path)
    except Exception as error:  # clients of buckets raise types of their own
        raise UserError(
            f"{option}: {target} cannot be written ({first_line(error)}). {elsewhere(files)}"
        ) from error
    finally:
        for path in temporary.values():
            with contextlib.suppress(Exception):  # the failure is told once
                path.unlink(missing_ok=True)


def elsewhere(files: Mapping[str, bytes]) -> str:
    """Writes files into a new temporary folder; returns a sentence that says where they are."""
    try:
        rescue = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-"))
        for name, content in files.items():
            (rescue / name).write_bytes(content)
    except OSError as error:
        return f"Nor could anything be written to {tempfile.gettempdir()}: {error.strerror}"
    return f"Nothing is lost: {', '.join(str(rescue / name) for name in files)}"
