"""Files are streamed whole, in pieces that change no token, and errors name file and place."""

import codecs
import gzip
import json
import lzma

from etils import epath
from hypothesis import given
from hypothesis import strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvjax.data import readers
from kvjax.data import record_readers
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.errors import DataError

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
def test_text_is_the_same_for_every_block_size(tmp_path_factory, whole, documents, block):
    path = epath.Path(tmp_path_factory.getbasetemp()) / "blocks.txt"
    path.write_bytes("\f".join(documents).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", block)
        assert whole(readers.read_text(path)) == documents


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


def compressed(suffix, content):
    """`content` compressed as `suffix` says."""
    if suffix == ".zst":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as out:
            out.write(content)
        return sink.getvalue().to_pybytes()
    return {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](content)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_jsonl_gives_its_texts(tmp_path, suffix):
    path = epath.Path(tmp_path / f"texts.jsonl{suffix}")
    lines = [json.dumps({"id": 1, "content": text}) for text in TEXTS]
    path.write_bytes(compressed(suffix, ("\n\n".join(lines) + "\n").encode()))
    assert list(record_readers.read_jsonl(path, "content")) == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_truncated_compressed_file_is_named(tmp_path, suffix):
    path = epath.Path(tmp_path / f"cut.jsonl{suffix}")
    lines = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(20_000))
    content = compressed(suffix, lines.encode())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(readers.SourceError, match=r"cut\.jsonl.* can't be decompressed"):
        list(record_readers.read_jsonl(path, "text"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 2 is no JSON"),
        ('{"body": "a"}', r"line 2 has no key 'text'; it has \['body'\]. Set text_key"),
        ('["a"]', "line 2 has no key 'text'; it has list"),
        ('{"text": 1}', "line 2: 'text' is int, not text"),
        ('{"text": "\\ud800"}', "line 2: 'text' holds half a surrogate pair"),
    ],
)
def test_bad_json_line_is_named(tmp_path, line, message):
    path = epath.Path(tmp_path / "bad.jsonl")
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(readers.SourceError, match=r"bad\.jsonl, " + message):
        list(record_readers.read_jsonl(path, "text"))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_gives_its_texts(tmp_path, kind):
    path = epath.Path(tmp_path / "shard.parquet")
    texts = [None, *TEXTS] * 300
    pq.write_table(pa.table({"id": range(1200), "text": pa.array(texts).cast(kind)}), path)
    assert list(record_readers.read_parquet(path, "text")) == TEXTS * 300


def test_bad_parquet_is_named(tmp_path):
    path = epath.Path(tmp_path / "shard.parquet")
    pq.write_table(pa.table({"id": [1], "body": ["a"], "raw": [b"\xff"]}), path)
    with pytest.raises(
        readers.SourceError, match=r"has no column 'text'; it has \['id', 'body', 'raw'\]"
    ):
        list(record_readers.read_parquet(path, "text"))
    with pytest.raises(readers.SourceError, match=r"column 'id' is int64, not text"):
        list(record_readers.read_parquet(path, "id"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(readers.SourceError, match=r"shard\.parquet is no whole Parquet file"):
        list(record_readers.read_parquet(path, "body"))


def test_forbidden_file_is_named(tmp_path, monkeypatch):
    path = epath.Path(tmp_path / "secret.txt")
    path.write_text("a")

    def forbid(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", forbid)
    with pytest.raises(DataError, match=r"secret\.txt can't be read.*permissions"):
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


def test_deep_nesting_is_no_json(tmp_path):
    path = epath.Path(tmp_path / "deep.jsonl")
    for line in ("[" * 200_000, '{"text": ' * 200_000, '{"text": ' + "[" * 200_000):
        path.write_text('{"text": "a"}\n' + line + "\n")
        with pytest.raises(readers.SourceError, match="line 2 is no JSON"):
            list(record_readers.read_jsonl(path, "text"))


def test_a_parquet_column_may_have_a_dot_in_its_name(tmp_path):
    path = epath.Path(tmp_path) / "a.parquet"
    pq.write_table(pa.table({"a": ["x"], "a.b": ["yes"]}), str(path))
    assert [range[:2] for range in record_readers.parquet_ranges(path, "a.b", 1000)] == [(0, 1)]
    assert list(record_readers.read_parquet(path, "a.b")) == ["yes"]
