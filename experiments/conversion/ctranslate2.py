"""Reads a model in CTranslate2's format: `model.bin`, named arrays one after another.

    uint32 version, string specification, uint32 revision
    uint32 count, then per variable:
        string name, uint8 rank, uint32 shape[rank], uint8 type, uint32 bytes, data
    uint32 count, then per alias: string name, string name of a variable

All little-endian; a string is a uint16 length, that many bytes, and the last of them is 0. Source:
OpenNMT/CTranslate2, python/ctranslate2/specs/model_spec.py.
"""

import math
import struct

from etils import epath
import ml_dtypes
import numpy as np

from kvjax.foundation.errors import MissingDataError, UserError

VERSION = 6  # of the format; older versions have another layout
_TYPES = dict(enumerate((np.float32, np.int8, np.int16, np.int32, np.float16, ml_dtypes.bfloat16)))


def read(path: epath.PathLike, *, specification: str, revision: int) -> dict[str, np.ndarray]:
    """Returns a model's arrays by name, in their stored types; an alias is a further name.

    Args:
      specification, revision: the expected ones, such as ("WhisperSpec", 3).

    Raises:
      UserError: no such file, another version, specification or revision, or a damaged file.
    """
    file = _File(epath.Path(path))
    version = file.integer("I")
    if version != VERSION:
        raise file.error(f"is version {version} of CTranslate2's format, or none; give {VERSION}")
    found, number = file.string(), file.integer("I")
    if (found, number) != (specification, revision):
        asked = f"must be {specification}, revision {revision}"
        raise file.error(f"holds a model of {found!r}, revision {number}; it {asked}")
    variables = {}
    for _ in range(file.integer("I")):
        name = file.string()
        variables[name] = file.array(name)
    for _ in range(file.integer("I")):
        alias, name = file.string(), file.string()
        if name not in variables:
            raise file.error(f"is damaged: {alias} is an alias of {name}, which is not there")
        variables[alias] = variables[name]
    if file.offset != len(file.content):
        raise file.error(f"is damaged: {len(file.content) - file.offset} bytes follow its end")
    return variables


class _File:
    """The content of a file and the offset of the next byte to read."""

    def __init__(self, path: epath.Path):
        self.path, self.offset = path, 0
        try:
            self.content = path.read_bytes()
        except FileNotFoundError as error:
            raise MissingDataError(f"{path}: there is no such file") from error
        except OSError as error:
            raise self.error(f"cannot be read ({error.strerror or error})") from error

    def error(self, text: str) -> UserError:
        return UserError(f"{self.path}: {text}")

    def take(self, count: int) -> bytes:
        start, self.offset = self.offset, self.offset + count
        if self.offset > len(self.content):
            size = f"{len(self.content)} bytes, and byte {self.offset - 1} is needed"
            raise self.error(f"is truncated: it has {size}; copy or install it again")
        return self.content[start : self.offset]

    def integer(self, code: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.integer("H")).rstrip(b"\0").decode(errors="replace")

    def array(self, name: str) -> np.ndarray:
        shape = tuple(self.integer("I") for _ in range(self.integer("B")))
        code, size = self.integer("B"), self.integer("I")
        if code not in _TYPES:
            raise self.error(f"{name} has type {code}; known are {min(_TYPES)} to {max(_TYPES)}")
        dtype = np.dtype(_TYPES[code])
        if size != math.prod(shape) * dtype.itemsize:
            raise self.error(f"is damaged: {name} is {dtype}{list(shape)} in {size} bytes")
        return np.frombuffer(self.take(size), dtype.newbyteorder("<")).reshape(shape)
