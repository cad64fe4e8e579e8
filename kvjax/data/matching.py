"""Finds the files that a path, folder or pattern names."""

import os
import pathlib

from etils import epath

from kvjax.data import formats, readers
from kvjax.foundation import runtime
from kvjax.foundation.errors import MissingDataError, first_line
from kvjax.foundation.files import in_bucket, special

_MAGIC = "*?["


def files(pattern: str, suffixes: tuple[str, ...], where: str, advice: str) -> list[epath.Path]:
    """Returns the files of a path, folder (those directly in it) or pattern, sorted.

    Args:
      suffixes: the formats that are read.
      where: for messages: the key and its value.
      advice: for messages: what to do where nothing is there.

    Raises:
      MissingDataError: no file.
      SourceError: a file of another format, a pipe or a device, a folder that cannot be listed.
    """
    path = runtime.path(where.partition(" = ")[0], pattern)
    try:
        found = matching(path, suffixes)
    except (OSError, ValueError, NotImplementedError) as error:  # `a**` is no pattern
        raise readers.SourceError(f"{where}: cannot be opened: {first_line(error)}") from error
    if not found:
        alone = ", ".join(formats.NAMED_ONLY)
        named = f"; of a folder {alone} is read by pattern, as {pattern}/*{alone}"
        raise MissingDataError(f"{where}: matches no file{advice}{named if path.is_dir() else ''}")
    for file in found:
        if not formats.suffix(file.name, suffixes):
            raise readers.SourceError(
                f"{where}: {os.fspath(file)} ends in none of {formats.listed(suffixes)}: convert "
                "or rename it"
            )
        if kind := special(file):
            raise readers.SourceError(f"{where}: {os.fspath(file)} is {kind}: give files")
        if not in_bucket(file) and not file.exists():
            raise readers.SourceError(
                f"{where}: {os.fspath(file)} is a link to nothing: mend or remove it"
            )
    return found


def matching(path: epath.Path, suffixes: tuple[str, ...]) -> list[epath.Path]:
    """Returns the files of a path, folder or pattern, sorted; of any format where it is a pattern.

    As much of a pattern as is there is taken as it stands: `[1]` may be a part of a name. Neither
    a folder nor a pattern gives hidden files (`._a.jsonl` of macOS), unless it has the dot itself,
    or markers such as Spark's `_SUCCESS`.
    """
    path, pattern = _as_it_stands(path)
    if pattern:
        shown = any(part.startswith(".") for part in pattern)
        # epath would take brackets of the folder for a part of the pattern
        local = path if in_bucket(path) else pathlib.Path(path)
        found = map(epath.Path, local.glob("/".join(pattern)))
        found = (p for p in found if shown or not _is_hidden(p, path))
        found = (p for p in found if formats.suffix(p.name, suffixes) or p.name[0] != "_")
    elif path.is_dir():
        own = tuple(end for end in suffixes if end not in formats.NAMED_ONLY)
        found = (p for p in path.iterdir() if formats.suffix(p.name, own))
        found = (p for p in found if not _is_hidden(p, path))
    else:
        return [path] if path.exists() else []
    return sorted(p for p in found if not p.is_dir())


def _as_it_stands(path: epath.Path) -> tuple[epath.Path, tuple[str, ...]]:
    """Returns the part of a path that is there, and the rest as a pattern's parts, if it is one."""
    parts = path.parts
    magic = [i for i, part in enumerate(parts) if any(c in part for c in _MAGIC)]
    if not magic:
        return path, ()
    folder = epath.Path(*parts[: magic[0]])
    for i in range(magic[0], len(parts)):
        if not (folder / parts[i]).exists():
            return folder, parts[i:]
        folder = folder / parts[i]
    return folder, ()


def _is_hidden(path: epath.Path, folder: epath.Path) -> bool:
    return any(part.startswith(".") for part in path.parts[len(folder.parts) :])
