"""SentencePiece's files of pieces encode as the tokenizer that the pieces came from."""

from etils import epath
import gguf
import pytest
import tokenizers

from kvjax.convert import pieces, published
from kvjax.foundation.errors import UserError
from tests import sentencepiece_files
from tests.convert import comparison, gguf_files
from tests.sentencepiece_files import HARD, SPECIALS


def check(tokenizer_json):
    """Fails unless texts without names of control tokens are encoded as by the trained BPE."""
    got = tokenizers.Tokenizer.from_str(tokenizer_json)
    trained = sentencepiece_files.backend("llama2")
    for text in (*sentencepiece_files.TEXT[::2], *HARD):
        if not any(name in text for name in SPECIALS):
            ids = got.encode(text, add_special_tokens=False).ids
            assert ids == trained.encode(text, add_special_tokens=False).ids
            assert got.decode(ids) == text
    assert [got.encode(name).ids for name in SPECIALS[1:]] == [[1], [2]]


def test_a_model_file(tmp_path):
    path = epath.Path(tmp_path / "tokenizer.model")
    path.write_bytes(sentencepiece_files.model_file(sentencepiece_files.pieces()))
    check(pieces.read(path))


def test_a_model_file_is_read_as_its_library_reads_it(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    content = sentencepiece_files.model_file(sentencepiece_files.pieces())
    (tmp_path / "tokenizer.model").write_bytes(content)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    got = tokenizers.Tokenizer.from_str(pieces.read(epath.Path(tmp_path / "tokenizer.model")))
    got.encode_special_tokens = True
    for text in HARD:
        assert got.encode(text).ids == library.encode(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x0a", "download it again"),
        (b"\xff\xff", "download it again"),
        (sentencepiece_files.model_file([("a", 0.0, 1)] * 2), "a piece is listed twice"),
        (sentencepiece_files.model_file([("a", 0.0, 1)], algorithm=3), "neither a BPE nor a Uni"),
        (sentencepiece_files.model_file([("a", 0.0, 9)]), "9 is not a valid Kind"),
    ],
)
def test_other_files_are_refused(tmp_path, content, said):
    path = epath.Path(tmp_path / "tokenizer.model")
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"tokenizer\.model cannot be read \(.*{said}"):
        pieces.read(path)


def test_pieces_of_a_gguf_file(tmp_path):
    listed = sentencepiece_files.pieces()
    rows = len(listed) + 3

    def edit(writer, _):
        padded = listed + [(f"[PAD{i}]", 0.0, 5) for i in range(len(listed), rows)]
        for key in ("model", "list", "scores", "token_type", "merges", "pre"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{'tokens' if key == 'list' else key}", None)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, _, _ in padded])
        writer.add_token_scores([score for _, score, _ in padded])
        writer.add_token_types([gguf.TokenType(kind) for _, _, kind in padded])
        del writer.kv_data[0]["tokenizer.ggml.bos_token_id"]
        writer.add_bos_token_id(1)

    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, comparison.PUBLISHED / "llama", "llama", rows=rows, edit=edit)
    model = published.open(epath.Path(path))
    check(model.tokenizer_json)
    assert model.transformer.vocab_size == rows and model.bos_token == "<s>"
