"""Reads JSON from files that hold anything, makes data what JSON can hold, guards records."""

from collections.abc import Mapping
import dataclasses
import json
import math
import re
import zlib

from etils import epath
import numpy as np

from kvjax.foundation.errors import UserError
from kvjax.foundation.files import special

# May be half a surrogate pair: its escape, or bytes that Python's reader lets pass.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")

CHECKSUM = "crc32"


def parse(text: str | bytes):
    """What the text says.

    Raises:
      ValueError: it is not UTF-8, no JSON, or nested deeper than Python recurses.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_strictly(text: bytes):
    """Returns what the text says, where all readers of JSON agree on it.

    Raises:
      ValueError: see `parse`; NaN or Infinity, a key that stands twice in an object, half a
        surrogate pair.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a surrogate pair, which is no text ({error})") from error


def check_once(text: str | bytes, key: str) -> None:
    """Raises a ValueError for an object that has a key twice: Python would take the last."""
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except RecursionError:
        return  # told by who parses it
    if isinstance(pairs, tuple) and sum(name == key for name, _ in pairs) > 1:
        raise ValueError(f"the key {key!r} stands there twice")


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no number of JSON's")


def _unique(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def read_object(path: epath.Path, advice: str) -> dict:
    """The object that a file holds.

    Args:
      advice: what to do about a file that is missing or damaged; the end of the error.

    Raises:
      UserError: it is missing, cannot be read, or holds no JSON object.
    """
    if kind := special(path):
        raise UserError(f"{path} is {kind}: {advice}")
    try:
        tree = parse(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {advice}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): {advice}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is no JSON object: {advice}")
    return tree


def plain(data):
    """Returns data as JSON has it.

    Numpy's numbers and arrays become Python's, dataclasses their fields, NaN and infinity null.
    """
    if dataclasses.is_dataclass(data):
        return plain({field.name: getattr(data, field.name) for field in dataclasses.fields(data)})
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, np.ndarray | np.generic):
        data = data.tolist()
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def with_checksum(record: Mapping) -> dict:
    """Returns a record with a last key that holds the CRC-32 of its JSON.

    CRC-32 reveals every change within 32 bits in a row, so any flipped bit and any wrong byte, and
    all but one in 2^32 of other changes. It is no guard against somebody who means it.
    """
    return dict(record) | {CHECKSUM: _crc32(record)}


def without_checksum(record: dict) -> dict:
    """Returns what `with_checksum` was given, or as it is a record that never had a checksum.

    Raises:
      ValueError: the record is not what its checksum was made of.
    """
    if not record:
        return record
    rest = dict(record)
    name, value = rest.popitem()
    is_right = value == _crc32(rest)
    if name == CHECKSUM and is_right:
        return rest
    if CHECKSUM in record or is_right:  # right under another name: the name is damaged
        raise ValueError("its checksum is not that of its content")
    return record


def read_record(path: epath.Path, advice: str) -> dict:
    """Returns the record of a file, of `with_checksum` or older; a UserError as of `read_object`.

    Args:
      advice: also of a record that is not what was written.
    """
    try:
        return without_checksum(read_object(path, advice))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {advice}") from error


def _crc32(record: Mapping) -> int:
    try:
        return zlib.crc32(json.dumps(record).encode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
