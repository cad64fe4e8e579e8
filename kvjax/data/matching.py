"""Lists the files that a path, folder or glob matches."""

import os
import pathlib

from etils import epath

from kvjax.data import formats, readers
from kvjax.foundation import runtime
from kvjax.foundation.errors import MissingDataError, first_line
from kvjax.foundation.files import in_bucket
from kvjax.published import hub


def files(pattern: str, suffixes: tuple[str, ...], where: str, advice: str) -> list[epath.Path]:
    """Returns the files that a path, a folder (without subfolders) or a glob matches, sorted.

    Args:
      pattern: the path, folder or glob; files of an hf:// name are downloaded first.
      suffixes: supported formats.
      where: "KEY = VALUE" of the config, for messages.
      advice: appended to the message if no file matches.

    Raises:
      MissingDataError: no file matches.
      SourceError: an unsupported format, a pipe, a folder that cannot be listed.
    """
    key = where.partition(" = ")[0]
    if hub.is_name(pattern):
        path = hub.files(key, pattern, suffixes)
    else:
        path = runtime.path(key, pattern)
    try:
        paths = find(path, suffixes)
    except (OSError, ValueError, NotImplementedError) as error:  # or an invalid pattern, as `a**`
        raise readers.SourceError(f"{where}: cannot be opened: {first_line(error)}") from error
    if not paths:
        (suffix,) = formats.NAMED_ONLY
        hint = f"; to read a folder's {suffix} files, give the pattern {pattern}/*{suffix}"
        raise MissingDataError(f"{where}: matches no file{advice}{hint if path.is_dir() else ''}")
    for file in paths:
        if not formats.suffix(file.name, suffixes):
            raise readers.SourceError(
                f"{where}: {os.fspath(file)} ends in none of {formats.listed(suffixes)}: convert "
                "or rename it"
            )
        if not in_bucket(file) and not os.path.isfile(file):
            raise readers.SourceError(
                f"{where}: {os.fspath(file)} is a pipe, a device or a broken link: remove it"
            )
    return paths


def find(path: epath.Path, suffixes: tuple[str, ...]) -> list[epath.Path]:
    """Returns the files of a path, folder or glob, sorted.

    Files without one of the suffixes are skipped in a folder. Those that a glob matches are
    returned, so that `files` can refuse them, except for markers such as Spark's `_SUCCESS`, whose
    names begin with "_". Hidden files (macOS writes `._a.jsonl`) are skipped unless a part of the
    glob begins with a dot. The longest existing prefix of a glob is taken literally, since `[1]`
    may be part of a name.
    """
    path, pattern = _split_glob(path)
    if pattern:
        includes_hidden = any(part.startswith(".") for part in pattern)
        # epath would treat brackets in the folder's name as part of the glob
        local = path if in_bucket(path) else pathlib.Path(path)
        matches = map(epath.Path, local.glob("/".join(pattern)))
        matches = (p for p in matches if includes_hidden or not _is_hidden(p, path))
        matches = (p for p in matches if formats.suffix(p.name, suffixes) or p.name[0] != "_")
    elif path.is_dir():
        folder_suffixes = tuple(end for end in suffixes if end not in formats.NAMED_ONLY)
        matches = (p for p in path.iterdir() if formats.suffix(p.name, folder_suffixes))
        matches = (p for p in matches if not _is_hidden(p, path))
    else:
        return [path] if path.exists() else []
    return sorted(p for p in matches if not p.is_dir())


def _split_glob(path: epath.Path) -> tuple[epath.Path, tuple[str, ...]]:
    """Returns the longest existing prefix of a glob, and the remaining parts; (): no glob."""
    parts = path.parts
    special = [i for i, part in enumerate(parts) if any(c in part for c in hub.MAGIC)]
    if not special:
        return path, ()
    folder = epath.Path(*parts[: special[0]])
    for i in range(special[0], len(parts)):
        if not (folder / parts[i]).exists():
            return folder, parts[i:]
        folder = folder / parts[i]
    return folder, ()


def _is_hidden(path: epath.Path, folder: epath.Path) -> bool:
    return any(part.startswith(".") for part in path.parts[len(folder.parts) :])
