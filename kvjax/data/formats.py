"""File formats by suffix (case-insensitive), and decompression."""

import bz2
from collections.abc import Sequence
import gzip
import io
import lzma
import shlex
from typing import BinaryIO
import zlib

BLOCK_BYTES = 1 << 20
TEXT, PARQUET, CSV = ".txt", ".parquet", ".csv"
PLAIN_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
COMPRESSED_LINES = tuple(end + packed for end in PLAIN_LINES for packed in COMPRESSIONS)
LINES = (*PLAIN_LINES, *COMPRESSED_LINES)
# Skipped in a folder, where such files mostly describe other files; a path or glob may name them.
NAMED_ONLY = (".json",)
# Raised for damaged or truncated files. An OSError may also come from a disk or network.
DECOMPRESSION_ERRORS = (EOFError, lzma.LZMAError, zlib.error, OSError)


def suffix(name: str, among: Sequence[str]) -> str:
    """Returns the suffix among these that a file's name has (case-insensitive); "" for none."""
    return next((end for end in among if name.lower().endswith(end)), "")


def listed(suffixes: Sequence[str]) -> str:
    """Returns text for messages that lists suffixes, and compressions only once."""
    plain = ", ".join(end for end in suffixes if end not in COMPRESSED_LINES)
    compressed = f" ({', '.join(PLAIN_LINES)} also followed by {', '.join(COMPRESSIONS)})"
    return plain + (compressed if set(suffixes) & set(COMPRESSED_LINES) else "")


def decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """Returns a file's bytes, decompressed as its suffix says; may raise DECOMPRESSION_ERRORS."""
    compression = suffix(name, COMPRESSIONS)
    if compression and not file.read(1):  # gzip and zstd would accept an empty file
        raise EOFError("it is empty")
    if compression:
        file.seek(0)
    if compression == ".gz":
        return gzip.open(file, "rb")
    if compression == ".bz2":
        return bz2.open(file, "rb")
    if compression == ".xz":
        return lzma.open(file, "rb")
    if compression == ".zst":
        import pyarrow  # Takes 0.3 s.

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
        return io.BufferedReader(stream, BLOCK_BYTES)
    return file


def not_decompressed(name: str, error: Exception) -> str:
    """Returns the message for a file that cannot be decompressed."""
    if "too much memory" in str(error):  # zstd --long=28 and above
        return (
            f"{name} cannot be decompressed: it was made with a window of more than 128 MiB. "
            f"Compress it again: zstd -dc --long=31 {shlex.quote(name)} | zstd -o OTHER.jsonl.zst"
        )
    return f"{name} cannot be decompressed: {error}. Is it truncated? Fetch it again."
