"""JSON: reads files with errors for users, converts data, and guards records by a checksum."""

from collections.abc import Mapping
import dataclasses
import json
import math
import re
import zlib

from etils import epath
import numpy as np

from kvjax.foundation.errors import UserError

# A lone surrogate: its escape, or its bytes, which Python's decoder accepts.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")

CHECKSUM = "crc32"


def parse(text: str | bytes):
    """Parses JSON.

    Raises:
      ValueError: not UTF-8, not JSON, or nested deeper than Python recurses.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_strictly(text: bytes):
    """Parses JSON that every reader understands alike.

    Raises:
      ValueError: see `parse`; also NaN or Infinity, a repeated key, a lone surrogate.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"has a lone surrogate ({error})") from error


def check_once(text: str | bytes, key: str) -> None:
    """Raises a ValueError if the object has the key twice; Python would take the last value."""
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except RecursionError:
        return  # reported when it is parsed
    if isinstance(pairs, tuple) and sum(name == key for name, _ in pairs) > 1:
        raise ValueError(f"the key {key!r} occurs twice")


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple]) -> dict:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} occurs twice")
    return unique


def read_object(path: epath.Path, advice: str) -> dict:
    """Returns the JSON object in a file.

    Args:
      advice: remedy for a missing or damaged file, the end of the message.

    Raises:
      UserError: the file is missing, unreadable, or not a JSON object.
    """
    try:
        tree = parse(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {advice}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): {advice}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object: {advice}")
    return tree


def plain(data):
    """Converts data to JSON's types.

    NumPy numbers and arrays become Python's, dataclasses their fields, NaN and infinity null.
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
    """Appends the CRC-32 of a record's JSON as its last key.

    CRC-32 detects every error within 32 consecutive bits, and misses one in 2^32 other errors.
    """
    return dict(record) | {CHECKSUM: _crc32(record)}


def without_checksum(record: dict) -> dict:
    """Returns the record without its checksum; records without one pass unchanged.

    Raises:
      ValueError: the checksum does not match.
    """
    if not record:
        return record
    content = dict(record)
    name, value = content.popitem()
    matches = value == _crc32(content)
    if name == CHECKSUM and matches:
        return content
    if CHECKSUM in record or matches:  # a valid sum under another name: the name is damaged
        raise ValueError("its checksum does not match its content")
    return record


def read_record(path: epath.Path, advice: str) -> dict:
    """Returns the record in a file, with or without a checksum; errors as in `read_object`.

    Args:
      advice: remedy for a damaged record, too.
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
