"""Files of JSON records, one per line and sorted by name, which are written one at a time."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import pathlib
import re

from etils import epath

from kvjax.foundation import target
from kvjax.foundation.errors import UserError

_NAME = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*")')


def read(file: pathlib.Path) -> dict[str, dict]:
    """Returns all records by name; none if the file is missing."""
    return {name: _parse(line) for name, line in _lines(file).items()}


def find(file: pathlib.Path, name: str) -> dict | None:
    """Returns one record without parsing the others; None if it is missing."""
    line = _lines(file).get(name)
    return None if line is None else _parse(line)


def check(option: str, file: pathlib.Path) -> None:
    """Raises a UserError that names the option if a line of an existing file is not a record."""
    try:
        _lines(file)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error


def put(file: pathlib.Path, name: str, record: Mapping | None, *, option: str = "--save") -> None:
    """Writes, replaces or (None) removes one record; the file is replaced whole or not at all.

    Several processes may write to one file: each waits for its turn.

    Args:
      record: JSON-able, without the key "name".
      option: the option that names the file, for messages.

    Raises:
      UserError: the file cannot be written; names where its content was written instead.
    """
    with _locked(file):
        lines = _lines(file)
        lines.pop(name, None)
        if record is not None:
            lines[name] = json.dumps({"name": name, **record})
        text = "".join(f"{lines[key]}\n" for key in sorted(lines))
        target.write(epath.Path(file.parent), {file.name: text.encode()}, option)


def _lines(file: pathlib.Path) -> dict[str, str]:
    """Returns each record's line by its name."""
    lines = file.read_text().splitlines() if file.exists() else []
    by_name = {}
    for number, line in enumerate(lines, start=1):
        match = _NAME.match(line)
        if not match:
            raise UserError(f"{file}, line {number}: is no record with a name")
        by_name[json.loads(match[1])] = line
    return by_name


def _parse(line: str) -> dict:
    record = json.loads(line)
    del record["name"]
    return record


@contextlib.contextmanager
def _locked(file: pathlib.Path) -> Iterator[None]:
    """Waits for other writers; takes no lock if the folder cannot be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # `target.write` reports it
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(file.parent / f".{file.name}.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
