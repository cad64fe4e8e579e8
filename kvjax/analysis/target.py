"""The folder that a page and what belongs to it are written to."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import os
import tempfile

from etils import epath

from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket


def check(out: str, names: Iterable[str]) -> epath.Path:
    """The folder that --out names.

    Args:
      names: of the files that are to be written there.

    Raises:
      UserError: they cannot be.
    """
    path = runtime.folder("--out", out)
    if in_bucket(path):
        return path
    for name in names:
        if (path / name).is_dir():
            raise UserError(f"--out = {out!r}: {name} is a folder there: give another, or move it")
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        why = f"nothing can be made in {there} ({error.strerror or error})"
        raise UserError(f"--out = {out!r}: cannot be written: {why}") from error
    return path


@contextlib.contextmanager
def folder(path: epath.Path) -> Iterator[None]:
    """Makes a folder before it is needed; it is gone again where the block fails.

    Raises:
      UserError: it cannot be made.
    """
    new = [] if in_bucket(path) else [one for one in (path, *path.parents) if not one.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: {path} cannot be made: {error.strerror or error}") from error
        yield
    except BaseException:
        for one in new:
            with contextlib.suppress(OSError):  # it was not made, or somebody else wrote there
                os.rmdir(one)
        raise


def write(target: epath.Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a folder that is there, each whole or not at all: somebody may look.

    Raises:
      UserError: they cannot be written.
    """
    temporary = {target / name: target / f".{name}.tmp" for name in files}
    try:
        for path, content in zip(temporary.values(), files.values(), strict=True):
            path.write_bytes(content)
        for path, written in temporary.items():
            written.replace(path)
    except OSError as error:
        raise UserError(f"--out: {target} cannot be written: {error}") from error
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
