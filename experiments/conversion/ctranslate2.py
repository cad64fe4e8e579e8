"""Reads a model in CTranslate2's format: `model.bin`, named arrays one after another.

    uint32 version, string specification, uint32 revision
    uint32 count, then per variable:
        string name, uint8 rank, uint32 shape[rank], uint8 type, uint32 bytes, data
    uint32 count, then per alias: string name, string name of a variable

All little-endian. A string is a uint16 length and as many bytes, the last of which is 0. Source:
OpenNMT/CTranslate2, python/ctranslate2/specs/model_spec.py.
"""

import math
import struct

from etils import epath
import ml_dtypes
import numpy as np

from kvjax.foundation.errors import UserError

VERSION = 6  # version of the format; older versions have another layout
_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16, ml_dtypes.bfloat16)


def read(path: epath.PathLike, *, specification: str, revision: int) -> dict[str, np.ndarray]:
    """Returns a model's arrays by name, in their stored types; an alias is a further name.

    Args:
      specification, revision: the expected ones, such as ("WhisperSpec", 3).

    Raises:
      UserError: no such file, another version, specification or revision, or a damaged file.
    """
    path = epath.Path(path)
    try:
        return _variables(_Reader(path.read_bytes()), (VERSION, specification, revision))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (struct.error, ValueError, LookupError) as error:
        raise UserError(
            f"{path}: must be a whole CTranslate2 file of version {VERSION} with {specification}, "
            f"revision {revision} ({error}): copy or install it again"
        ) from error


def _variables(file: "_Reader", expected: tuple) -> dict[str, np.ndarray]:
    header = file.number("I"), file.string(), file.number("I")
    if header != expected:
        raise ValueError(f"it begins with {header}")
    variables = {file.string(): file.array() for _ in range(file.number("I"))}
    for _ in range(file.number("I")):
        alias, name = file.string(), file.string()
        variables[alias] = variables[name]
    if file.offset != len(file.content):
        raise ValueError(f"{len(file.content) - file.offset} bytes follow its end")
    return variables


class _Reader:
    """The content of a file and the offset of the next byte to read."""

    def __init__(self, content: bytes):
        self.content, self.offset = content, 0

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self.content, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def string(self) -> str:
        (text,) = struct.unpack_from(f"{self.number('H')}s", self.content, self.offset)
        self.offset += len(text)
        return text.rstrip(b"\0").decode(errors="replace")

    def array(self) -> np.ndarray:
        shape = tuple(self.number("I") for _ in range(self.number("B")))
        dtype = np.dtype(_TYPES[self.number("B")]).newbyteorder("<")
        count, size = math.prod(shape), self.number("I")
        if size != count * dtype.itemsize:
            raise ValueError(f"{dtype}{list(shape)} in {size} bytes")
        flat = np.frombuffer(self.content[self.offset : self.offset + size], dtype)
        self.offset += size
        return flat.reshape(shape)
