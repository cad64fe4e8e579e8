"""Reads and writes files of a workdir, local or in a bucket, so that nothing is lost."""

import errno
import fnmatch
import os
import stat

from etils import epath


def in_bucket(path: epath.PathLike) -> bool:
    """Whether a path names something in a bucket (gs://, s3://), not on a disk."""
    return "://" in os.fspath(path)


_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def special(path: epath.PathLike) -> str:
    """Returns the kind of what is neither a file nor a folder ("a pipe"); else "".

    Whoever opens a pipe waits until somebody writes to it, maybe for ever.
    """
    if in_bucket(path):
        return ""
    try:
        return _SPECIAL.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except (OSError, ValueError):  # not there, or no path (NUL): who opens it says so
        return ""


def size(path: epath.PathLike) -> int | None:
    """Bytes of a file; None if it is not there. Of a local one the system is asked directly."""
    try:
        return epath.Path(path).stat().length if in_bucket(path) else os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def named(folder: epath.Path, pattern: str) -> list[epath.Path]:
    """Returns what lies in a folder with a name of a pattern, by name; [] where no folder is.

    etils' `glob` takes brackets in the folder's own path for a part of the pattern. Hidden files
    are left out.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return []
        raise
    shown = [name for name in names if not name.startswith(".")]
    return [folder / name for name in sorted(fnmatch.filter(shown, pattern))]


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.parent / f".{path.name}.tmp"
    temporary.write_text(text)
    temporary.replace(path)


def unused(path: epath.Path) -> epath.Path:
    """The path if nothing is there; else with -2, -3 and so on after its stem."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.parent / f"{path.stem}-{number}{path.suffix}"
    return candidate


class Watched:
    """A local folder that is to stay where it is; of a bucket nothing is watched.

    Args:
      path: of a folder that is there.
    """

    def __init__(self, path: epath.Path):
        self.path = path
        self._open = None if in_bucket(path) else os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def change(self) -> tuple[str, epath.Path | None]:
        """Returns a phrase that says where the folder is now, and that path; "" if it stayed."""
        if self._open is None:
            return "", None
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._open)):
                return "", None
        except OSError:
            pass
        try:  # Linux knows where it is
            new = epath.Path(os.readlink(f"/proc/self/fd/{self._open}"))
            if os.path.samestat(os.stat(new), os.fstat(self._open)):
                return f"was moved to {new}", new
        except OSError:
            pass
        return "was moved or removed", None

    def close(self) -> None:
        """Stops watching."""
        if self._open is not None:
            os.close(self._open)
            self._open = None


def forget_listings(path: epath.Path) -> None:
    """Makes the next look at a bucket see what other processes wrote; nothing on a disk."""
    if in_bucket(path):
        epath.backend.fsspec_backend.fs(path).invalidate_cache()


def move(source: epath.Path, target: epath.Path) -> None:
    """Moves a file or folder that may be there; in a bucket, which has no folders, by file."""
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
