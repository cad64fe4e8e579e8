"""Reads documents that are records of a file: JSON lines, Parquet rows, TFDS examples.

Each format has a function that yields texts. Errors name file and position. `on_error` is called
for each error, and for each record whose text is null.
"""

from collections.abc import Iterable, Iterator
import contextlib
import json
import os

from etils import epath

from kvjax.data import formats, readers, records
from kvjax.foundation import json_text


def line_ranges(path: epath.Path, key: str, limit: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, bytes): byte ranges of about `limit` bytes of a file of lines."""
    del key
    size, start = path.stat().length, 0
    while start < size:
        stop = size if size - start <= limit else readers.line_start(path, start + limit)
        yield start, stop, stop - start
        start = stop


def read_jsonl(
    path: epath.Path,
    key: str,
    start: int = 0,
    stop: int | None = None,
    on_error: readers.OnError = readers.raise_error,
) -> Iterator[str]:
    """Yields the text under `key` of each line of JSON lines, plain or compressed.

    Args:
      start, stop: byte range of a plain file; both are starts of lines.

    Raises:
      SourceError: the file is truncated, or a line (the message has its number) is not a JSON
        object with a text under `key`.
    """
    quoted = json.dumps(key, ensure_ascii=False).encode()

    def parse(line: bytes):
        # It is an error if an object has the key twice. A nested object or the text may contain it.
        if line.count(quoted) > 1:
            json_text.check_once(line, key)
        return json_text.parse(line)

    return _texts(records.json_lines(path, start, stop, on_error, parse=parse), key, on_error)


def jsonl_density(path: epath.Path, key: str) -> float:
    """Estimates bytes of text per stored byte of a file of JSON lines from its first lines."""
    name, stored, text_bytes = os.fspath(path), 0, 0
    compression = formats.suffix(name, formats.COMPRESSIONS)
    with readers.open_file(path) as file, contextlib.suppress(*formats.DECOMPRESSION_ERRORS):
        for line in formats.decompressed(file, name):
            with contextlib.suppress(ValueError, TypeError):  # reported when the file is read
                text_bytes += len(_text_of(json_text.parse(line), key, name).encode())
            stored = file.tell() if compression else stored + len(line)
            if text_bytes > readers.BLOCK_BYTES:
                break
    return text_bytes / stored if stored else 1.0


def parquet_ranges(path: epath.Path, column: str, limit: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, bytes): ranges of row groups with about `limit` bytes of text.

    Raises:
      SourceError: see `read_parquet`.
    """
    with records.open_parquet(path, column) as table:
        names = [table.metadata.schema.column(i).path for i in range(table.metadata.num_columns)]
        place = names.index(column)
        first = size = 0
        for group in range(table.num_row_groups):
            group_bytes = table.metadata.row_group(group).column(place).total_uncompressed_size
            if group > first and size + group_bytes > limit:
                yield first, group, size
                first, size = group, 0
            size += group_bytes
        if table.num_row_groups > first:
            yield first, table.num_row_groups, size


def read_parquet(
    path: epath.Path,
    column: str,
    start: int = 0,
    stop: int | None = None,
    on_error: readers.OnError = readers.raise_error,
) -> Iterator[str]:
    """Yields the texts of one column of a Parquet file.

    Args:
      start, stop: range of row groups.

    Raises:
      SourceError: the file is damaged, the column is missing, duplicate or not text, or a row is
        not UTF-8.
    """
    return _texts(records.parquet_rows(path, column, start, stop, on_error), column, on_error)


def read_tfds(
    builder,
    split: str,
    key: str,
    start: int = 0,
    stop: int | None = None,
    on_error: readers.OnError = readers.raise_error,
) -> Iterator[str]:
    """Yields the texts under feature `key` of a split of a TFDS data set.

    Args:
      start, stop: range of examples.

    Raises:
      SourceError: the split or feature does not exist, or a text is not UTF-8.
    """
    name = builder.info.full_name
    if split not in builder.info.splits:
        raise readers.SourceError(
            f"tfds:{name} has no split {split!r}; it has {list(builder.info.splits)}:"
            " tfds:NAME#SPLIT."
        )
    if key not in builder.info.features:
        raise readers.SourceError(
            f"tfds:{name} has no feature {key!r}; it has {list(builder.info.features)}. Set"
            " config.data.text_key to one of them."
        )
    rows = records.tfds_rows(builder, split, f"tfds:{name}#{split}", start, stop)
    yield from _texts(rows, key, on_error)


def _texts(rows: Iterable[tuple[str, dict]], key: str, on_error: readers.OnError) -> Iterator[str]:
    """Yields the text under a key of each row; calls `on_error` for rows without one."""
    for place, row in rows:
        try:
            text = _text_of(row, key, place)
        except readers.SourceError as error:
            on_error(error)
        else:
            yield text


def _text_of(row: dict, key: str, place: str) -> str:
    if key not in row:
        raise readers.SourceError(
            f"{place} has no key {key!r}; it has {list(row)}. Set config.data.text_key to the key "
            "of the text."
        )
    value = row[key]
    if value is None:
        raise readers.NullTextError(f"{place}: {key!r} is null")
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            raise readers.SourceError(
                f"{place}: {key!r} is {type(text).__name__}, not text. Correct it (null for no "
                "text), or set config.data.text_key to the key of the text."
            )
        if not text.isascii():
            text.encode()
    except UnicodeDecodeError as error:
        raise readers.SourceError(f"{place}: {key!r} is not UTF-8: {error}.") from error
    except UnicodeEncodeError as error:
        raise readers.SourceError(
            f"{place}: {key!r} has an unpaired surrogate, which UTF-8 cannot encode: {error}."
        ) from error
    return text
