"""Corpora of many small parts, and helpers for tests that prepare them."""

import json
import pathlib

import numpy as np

from kvjax.data import manifest, parts, pool, preparation, sources

PART = 1000  # bytes
T, SHARDS = 5, 40  # of `dataset`
ROWS = pathlib.PurePath(manifest.ROWS, manifest.ROWS_VERSION)


def files(folder) -> dict[str, bytes]:
    """Returns the bytes of every file, by path."""
    folder = pathlib.Path(folder)
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def begin_preparation(config) -> preparation.Preparation:
    """Begins a preparation."""
    return preparation.begin(preparation.inspect_sources(config, shown=False), shown=False)


def write_jsonl(path, texts):
    """Writes texts as JSON lines; returns the path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def joined(pieces) -> list[str]:
    """Returns the documents that pieces form."""
    documents = []
    for piece in pieces:
        if piece.starts_document:
            documents.append("")
        documents[-1] += piece.text
    return documents


def num_parts(config) -> int:
    """Returns the number of parts of a corpus."""
    return len(parts.parts(config, sources.fingerprints(config)))


def recording(indices):
    """Returns a `pool.make_part` that first appends the part's index to a list."""
    make_part = pool.make_part

    def make(config, part, *args, **kwargs):
        indices.append(part.index)
        make_part(config, part, *args, **kwargs)

    return make


def damage(file, how):
    """Damages a file: half, empty, missing, longer, or flipped (a bit of its content)."""
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
        return
    if how == "flipped":  # small files of rows are mostly padding, which is zeros
        content[next(i for i in range(100, len(content)) if content[i])] ^= 1
    elif how == "longer":
        content += b"\0"
    else:
        del content[len(content) // 2 if how == "half" else 0 :]
    file.write_bytes(content)


def rows_of(rows, indices):
    """Returns rows as int [len(indices), T + 1]."""
    return np.stack([row["tokens"] for row in rows.__getitems__(indices)])
