"""The parts of a corpus have the documents, splits and tokens of the whole."""

import dataclasses
import functools
import hashlib
import lzma

from etils import epath
from hypothesis import given, strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvjax.data import (
    config as config_lib,
    manifest,
    parts,
    readers,
    source_kinds,
    sources,
    tokenizer as tokenizer_lib,
)
from tests.data.corpora import joined, write_jsonl


def _text(path, texts):
    path.write_text("\f".join(texts))


def _parquet(path, texts):
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=7)


@pytest.fixture(params=[".txt", ".jsonl", ".parquet"])
def config(request, tmp_path, small_texts):
    """Three files of a format, the second an empty one where the format allows."""
    write = {".txt": _text, ".jsonl": write_jsonl, ".parquet": _parquet}[request.param]
    for i, texts in enumerate((small_texts[:90], [], small_texts[90:])):
        write(tmp_path / f"{i}{request.param}", texts)
    return config_lib.DataConfig(source=str(tmp_path), validation_fraction=0.1, sequence_length=1)


def _parts(config):
    return parts.parts(config, sources.fingerprints(config))


def _pieces(config):
    """Returns the pieces of all parts in order, by split, and the number of parts."""
    pieces, all_parts = {split: [] for split in manifest.SPLITS}, _parts(config)
    for part in all_parts:
        for split, piece in parts.split_pieces(config, part):
            pieces[split].append(piece)
    return pieces, len(all_parts)


def test_parts_are_the_whole(config, monkeypatch):
    uncut = {split: list(sources.pieces(config, split)) for split in manifest.SPLITS}
    for size in (100, 1000, 1 << 20):
        monkeypatch.setattr(parts, "PART_BYTES", size)
        pieces, count = _pieces(config)
        assert count > 12 if size < 9999 else count == 1
        for split in manifest.SPLITS:
            assert joined(pieces[split]) == joined(uncut[split]) and pieces[split]


def test_books_are_parts_as_they_lie(small_texts, tmp_path, monkeypatch):
    """Each book is one range; its last bytes are held out unless there is a validation source."""
    monkeypatch.setattr(source_kinds, "CORPUS", epath.Path(tmp_path))
    monkeypatch.setattr(source_kinds, "EMBEDDED_VALIDATION_BYTES", 1500)
    texts = {"train": [], "validation": [], "all": []}
    sizes, fingerprints = [], []
    for i, book in enumerate(source_kinds.BOOKS):
        content = "\f".join(small_texts[i::2]).encode()
        (tmp_path / book).write_bytes(lzma.compress(content))
        sizes.append((tmp_path / book).stat().st_size)
        cut = content.index(b"\n", len(content) - 1501) + 1
        texts["all"] += content.decode().split("\f")
        for split, part in (("train", content[:cut]), ("validation", content[cut:])):
            texts[split] += [text for text in part.decode().split("\f") if text]
        digest = hashlib.blake2b((tmp_path / book).read_bytes(), digest_size=16).hexdigest()
        fingerprints.append((f"embedded:{book}", f"embedded 1500 {digest}"))
        density = len(content) / sizes[-1]
        book = source_kinds.EmbeddedBook(epath.Path(tmp_path / book))
        assert list(book.ranges(7)) == [(0, 1, sizes[-1])] and book.density() == density
        other = tmp_path / "other.xz"
        other.write_bytes(lzma.compress(b"other"))
        assert book.stamp() != source_kinds.EmbeddedBook(epath.Path(other)).stamp()
    config = config_lib.DataConfig(validation_source=str(other.with_suffix(".txt")))
    other.with_suffix(".txt").write_text("held out")
    single = dataclasses.replace(config, validation_source="")
    assert sources.fingerprints(single)["source"] == fingerprints
    monkeypatch.setattr(parts, "PART_BYTES", min(sizes))
    monkeypatch.setattr(parts, "_ROWS", 1)
    (first, second), pieces = _parts(single), _pieces(single)[0]
    assert [part.bytes for part in (first, second)] == sizes
    assert [joined(pieces[split]) for split in manifest.SPLITS] == [
        texts["train"],
        texts["validation"],
    ]
    assert joined(_pieces(config)[0]["train"]) == texts["all"]


def test_parts_have_about_their_size_and_a_fixed_order(config, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    all_parts = _parts(config)
    assert [part.index for part in all_parts] == list(range(len(all_parts)))
    assert all(part.bytes <= 2000 for part in all_parts)
    assert _parts(config) == all_parts


def test_validation_files_are_for_validation_alone(config, monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    names = sorted(path.name for path in tmp_path.iterdir())
    two = dataclasses.replace(
        config, source=str(tmp_path / names[0]), validation_source=str(tmp_path / names[2])
    )
    pieces, _ = _pieces(two)
    for split, name in (("train", names[0]), ("validation", names[2])):
        single = dataclasses.replace(config, source=str(tmp_path / name), validation_fraction=0.5)
        expected = [
            piece for part in _parts(single) for _, piece in parts.split_pieces(single, part)
        ]
        assert sorted(joined(pieces[split])) == sorted(joined(expected))


@functools.cache
def _tokenizer():
    return tokenizer_lib.train(["abc abd\n  bcd\nab ab abc\r\n" * 40 + "a\n" * 9], 264)


@given(
    lines=st.sampled_from(["abc d\f\r\té", "abc d\r\té"]).flatmap(
        lambda letters: st.lists(st.text(letters, max_size=9), min_size=2, max_size=60)
    ),
    size=st.integers(1, 200),
)
def test_a_cut_changes_no_token_of_a_text(tmp_path_factory, lines, size):
    path = epath.Path(tmp_path_factory.getbasetemp()) / "cut.txt"
    path.write_bytes("\n".join(lines).encode())
    source = source_kinds.TextFile(path)
    pieces = [
        piece
        for range in source.ranges(size)
        for _, piece in source.split_pieces(0.0, range, readers.raise_error)
    ]
    assert _document_tokens(pieces) == _document_tokens(source.pieces("all", 0.0))


def _document_tokens(pieces):
    """Returns the tokens of each document, concatenated over its pieces."""
    documents = []
    for piece in pieces:
        if piece.starts_document:
            documents.append([])
        documents[-1] += _tokenizer().encode(piece.text)
    return documents


def test_parts_are_larger_where_rows_are_long():
    """A part holds at least 256 rows, and at most one is dropped."""
    for length in (16, 2048, 1 << 15, 1 << 17, 1 << 20):
        config = config_lib.DataConfig(sequence_length=length)
        rows = parts.part_bytes(config) / (4 * length)
        assert rows >= 256 and (parts.part_bytes(config) == parts.PART_BYTES) == (length <= 1 << 15)
