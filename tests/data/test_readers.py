"""Files are streamed completely, cut between tokens, and errors name file and position."""

import bz2
import codecs
import gzip
import json
import lzma

from etils import epath
from hypothesis import given, strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from kvjax.data import (
    readers,
    record_readers,
    source_kinds,
    tokenized_part,
    tokenizer as tokenizer_lib,
)
from kvjax.foundation.errors import DataError
from tests.data.corpora import joined

TEXTS = ["one\n", "zwei — två\n", "三 🙂"]


@pytest.fixture(scope="module")
def bpe():
    text = "a bb a1b a22! \n\n ab\n  bb ab..\n\t1 22 !!\n" * 3
    return tokenizer_lib.train([text], 265)


@given(text=st.text(alphabet="ab12 .!'\n\t\r\u00a0é", max_size=60), size=st.integers(1, 12))
def test_pieces_concatenate_to_the_text_and_to_its_tokens(bpe, text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_CHARACTERS", size)
        pieces = list(readers.read_document(text))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.starts_document for piece in pieces] == [i == 0 for i in range(len(pieces))]
    if len(text) < 64 * size:  # No line was endless.
        assert [i for piece in pieces for i in bpe.encode(piece.text)] == bpe.encode(text)


def test_long_documents_are_cut_at_lines_and_endless_lines_anywhere(monkeypatch):
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 4)
    lines = list(readers.read_document("abc\ndefg\n\nhi\n"))
    assert [piece.text for piece in lines] == ["abc\n", "defg\n\n", "hi\n"]
    endless = list(readers.read_document("x" * 600))
    assert [len(piece.text) for piece in endless] == [256, 256, 88]


@given(
    documents=st.lists(st.text(alphabet="aé中🙂\n", min_size=1, max_size=30), max_size=5),
    block=st.integers(1, 9),
)
def test_text_is_the_same_for_every_block_size(tmp_path_factory, documents, block):
    path = epath.Path(tmp_path_factory.getbasetemp()) / "blocks.txt"
    path.write_bytes("\f".join(documents).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", block)
        assert joined(readers.read_text(path)) == documents


def test_text_that_is_not_utf8_names_file_and_offset(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 4)
    path = epath.Path(tmp_path / "latin1.txt")
    path.write_bytes("中é".encode() + "été".encode("latin1"))
    with pytest.raises(readers.SourceError, match=r"latin1\.txt is not UTF-8: .* at byte 5"):
        list(readers.read_text(path))
    path.write_bytes("abcdefg中".encode()[:-1])
    with pytest.raises(readers.SourceError, match=r"unexpected end of data at byte 7"):
        list(readers.read_text(path))


def test_line_start_is_the_next_line(tmp_path):
    path = epath.Path(tmp_path / "lines.txt")
    path.write_bytes(b"ab\ncd\nef")
    starts = [readers.line_start(path, offset) for offset in range(9)]
    assert starts == [0, 3, 3, 3, 6, 6, 6, 8, 8]


PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: zstandard.ZstdCompressor().compress(content),
}


def _parquet(kind, **options):
    """Returns a function that writes texts as a column of a type, between two columns `id`."""

    def write(path, texts):
        if pa.types.is_dictionary(kind):
            values = pa.array(sorted({t for t in texts if t is not None}), kind.value_type)
            places = {t: i for i, t in enumerate(values.to_pylist())}
            column = [places.get(t) for t in texts]
            column = pa.DictionaryArray.from_arrays(pa.array(column, kind.index_type), values)
        else:
            column = pa.array(texts, kind)
        columns = [pa.array(range(len(texts))), column, pa.array(["x"] * len(texts))]
        table = pa.table(columns, names=["id", "content", "id"])
        pq.write_table(table, path, row_group_size=100, **options)

    return write


def _json_lines(pack, line_end="\n"):
    def write(path, texts):
        lines = [json.dumps({"id": 1, "content": text, "x": float("nan")}) for text in texts]
        path.write_bytes(pack((line_end * 2).join([*lines, ""]).encode()))

    return write


PARQUET = {
    **{
        str(kind): _parquet(kind)
        for kind in (
            *(pa.string(), pa.large_string(), pa.string_view()),
            *(pa.binary(), pa.large_binary(), pa.binary_view()),
            *(pa.dictionary(index, pa.string()) for index in (pa.int8(), pa.int64(), pa.uint64())),
            pa.dictionary(pa.int32(), pa.large_string()),
            pa.json_(),
        )
    },
    **{
        packed: _parquet(pa.string(), compression=packed)
        for packed in ("zstd", "brotli", "lz4", "gzip", "none")
    },
    "dictionary pages": _parquet(pa.string(), use_dictionary=["content"]),
}


@pytest.mark.parametrize("kind", ["lines", "parquet"])
def test_texts_are_the_same_in_every_format_and_nulls_are_counted(tmp_path, kind):
    texts = [None, *TEXTS] * 300
    writers = {f"a-{name}.parquet": write for name, write in PARQUET.items()}
    if kind == "lines":
        writers = {
            f"a{end}{packed}": _json_lines(pack)
            for end in (".jsonl", ".NDJSON", ".json")
            for packed, pack in PACK.items()
        } | {"crlf.JSONL": _json_lines(bytes, "\r\n")}
    for name, write in writers.items():
        path = epath.Path(tmp_path / name)
        write(path, texts)
        source = source_kinds.open_source(str(path), "content", "")
        errors = tokenized_part.ErrorCollector(False)
        read = [
            piece.text
            for part in source.ranges(4096)
            for _, piece in source.split_pieces(0.0, part, errors)
        ]
        assert read == TEXTS * 300, name
        assert errors.skipped() == tokenized_part.Skipped(nulls=300), name
        assert [piece.text for piece in source.pieces("all", 0.0)] == TEXTS * 300, name
        assert source.density() > 0


def test_columns_of_nulls_and_files_without_rows_hold_no_text(tmp_path):
    for name, column in (("nulls", pa.nulls(3)), ("empty", pa.array([], pa.string()))):
        path = epath.Path(tmp_path / f"{name}.parquet")
        with pq.ParquetWriter(path, pa.schema({"text": column.type})) as writer:
            for rows in (column[:0], column, column[:0]):  # row groups without rows, too
                writer.write_table(pa.table({"text": rows}))
        errors = tokenized_part.ErrorCollector(False)
        assert list(record_readers.read_parquet(path, "text", on_error=errors)) == []
        assert errors.skipped().nulls == len(column)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_truncated_compressed_file_is_named(tmp_path, suffix):
    path = epath.Path(tmp_path / f"cut.jsonl{suffix}")
    lines = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(20_000))
    content = PACK[suffix](lines.encode())
    for size in (len(content) // 2, 0):
        path.write_bytes(content[:size])
        with pytest.raises(readers.SourceError, match=r"cut\.jsonl.* cannot be decompressed"):
            list(record_readers.read_jsonl(path, "text"))


def test_a_long_window_is_told_with_what_to_do(tmp_path):
    path = epath.Path(tmp_path / "long.jsonl.zst")
    options = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    path.write_bytes(packer.compress(b'{"text": "a"}\n') + packer.flush())
    with pytest.raises(readers.SourceError, match=r"window .* zstd -dc --long=31 \S+long.jsonl"):
        list(record_readers.read_jsonl(path, "text"))


BAD_LINES = [
    (b'{"text": "a"', "is not JSON.*jq -c"),
    (b"[" * 200_000, "is not JSON: nested too deeply"),
    (b'{"text": ' * 200_000, "is not JSON: nested too deeply"),
    (b'{"text": "\xe9"}', "is not JSON: 'utf-8' codec can't decode"),
    (b'{"body": "a"}', r"has no key 'text'; it has \['body'\]. Set config.data.text_key"),
    (b'["a"]', "must be an object, not list.*jq -c"),
    (b'{"text": 1}', "'text' is int, not text"),
    (b'{"text": NaN}', r"'text' is float, not text. Correct it \(null for no text\)"),
    (b'{"text": "\\ud800"}', "'text' has an unpaired surrogate"),
    (b'{"text": "a", "text": "b"}', "is not JSON: the key 'text' occurs twice"),
]


def test_a_bad_json_line_is_named_and_may_be_left_out(tmp_path):
    path = epath.Path(tmp_path / "bad.jsonl")
    good = b'{"text": "\\"text\\" twice", "in": {"text": 1, "text": 2}}\n'
    for line, message in BAD_LINES:
        path.write_bytes(good + line + b"\n" + good)
        with pytest.raises(readers.SourceError, match=r"bad\.jsonl, line 2:? " + message):
            list(record_readers.read_jsonl(path, "text"))
        errors = tokenized_part.ErrorCollector(True)
        texts = list(record_readers.read_jsonl(path, "text", on_error=errors))
        assert texts == ['"text" twice'] * 2 and errors.skipped().count == 1


def test_bad_parquet_is_named(tmp_path):
    path = epath.Path(tmp_path / "shard.parquet")
    raw = pa.array([b"a"] * 300 + [b"\xff"] + [b"b"] * 9)
    names, columns = ["id", "raw", "text", "two", "two"], [pa.array(range(310)), *([raw] * 4)]
    columns[2] = raw.view(pa.string())  # as some writers do, without checking
    pq.write_table(pa.table(columns, names=names), path, row_group_size=200)
    for column, message in (
        ("none", r"has no column 'none'; it has \['id', 'raw', 'text', 'two', 'two'\]"),
        ("id", "column 'id' is int64, not text"),
        ("two", "has 2 columns named 'two'"),
        ("raw", "row 301: 'raw' is not UTF-8"),
        ("text", "row 301: 'text' is not UTF-8"),
    ):
        for read in (record_readers.read_parquet, record_readers.parquet_ranges):
            if column in ("raw", "text") and read is record_readers.parquet_ranges:
                continue
            with pytest.raises(readers.SourceError, match=rf"shard\.parquet:?,? {message}"):
                list(read(path, column, 1))
    for column in ("raw", "text"):  # other rows of the file are not lost
        errors = tokenized_part.ErrorCollector(True)
        texts = list(record_readers.read_parquet(path, column, on_error=errors))
        assert texts == ["a"] * 300 + ["b"] * 9 and errors.skipped().count == 1
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(readers.SourceError, match=r"shard\.parquet is not a complete Parquet file"):
        list(record_readers.read_parquet(path, "body"))


def test_forbidden_file_is_named(tmp_path, monkeypatch):
    path = epath.Path(tmp_path / "secret.txt")
    path.write_text("a")

    def forbid(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", forbid)
    with pytest.raises(DataError, match=r"secret\.txt cannot be read.*permissions"):
        list(readers.read_text(path))


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = codecs.BOM_UTF8
    text = epath.Path(tmp_path / "a.txt")
    text.write_bytes(mark + "é\nb\n".encode())
    assert [piece.text for piece in readers.read_text(text)] == ["é\nb\n"]
    size = len(mark) + 3
    assert [piece.text for piece in readers.read_text(text, 0, size)] == ["é\n"]
    assert [piece.text for piece in readers.read_text(text, size)] == ["b\n"]
    text.write_bytes(mark)
    assert list(readers.read_text(text)) == []
    records = b'{"text": "a"}\n{"text": "b"}\n'
    for name, pack in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)):
        path = epath.Path(tmp_path / name)
        path.write_bytes(pack(mark + records))
        assert list(record_readers.read_jsonl(path, "text")) == ["a", "b"]
        path.write_bytes(pack(mark + b"\n" + records))  # alone on a line
        assert list(record_readers.read_jsonl(path, "text")) == ["a", "b"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_mark_of_another_encoding_is_told(tmp_path, name, encoding):
    path = epath.Path(tmp_path / name)
    path.write_bytes('{"text": "a"}\n'.encode(encoding))
    read = readers.read_text(path) if name == "a.txt" else record_readers.read_jsonl(path, "text")
    with pytest.raises(
        readers.SourceError, match=f"{name} is {encoding.upper()} .*iconv -f {encoding}"
    ):
        list(read)


def test_a_parquet_column_may_have_a_dot_in_its_name(tmp_path):
    path = epath.Path(tmp_path) / "a.parquet"
    pq.write_table(pa.table({"a": ["x"], "a.b": ["yes"]}), str(path))
    assert [range[:2] for range in record_readers.parquet_ranges(path, "a.b", 1000)] == [(0, 1)]
    assert list(record_readers.read_parquet(path, "a.b")) == ["yes"]
