"""Reads SentencePiece vocabularies: the file `tokenizer.model`, and GGUF's pieces with scores.

The file's format is sentencepiece_model.proto of google/sentencepiece. Only the pieces with their
scores and kinds, the algorithm and the normalizer are read.
"""

import base64
from collections.abc import Iterator
import enum
import json
import struct
from typing import NamedTuple

from etils import epath

from kvjax.foundation.errors import UserError

FILE = "tokenizer.model"
_BLANK = "▁"


class Kind(enum.IntEnum):
    """Kind of a piece; GGUF's token types have the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """A token; its id is its position in a list of pieces."""

    text: str
    score: float
    kind: Kind


def tokenizer_json(
    pieces: list[Piece],
    *,
    is_unigram: bool = False,
    has_prefix: bool = True,
    is_trimmed: bool = False,
    normalization: bytes = b"",
) -> str:
    """Returns the `tokenizer.json` that encodes as SentencePiece.

    Args:
      has_prefix: put a blank before a text.
      is_trimmed: remove blanks around a text, and all but one blank of a run.
      normalization: a compiled table of SentencePiece; b"": none.
    """
    # User-defined pieces are found before blanks of the text become "▁".
    names = [p.text.replace(_BLANK, " ") if p.kind == Kind.USER_DEFINED else p.text for p in pieces]
    ids = {name: i for i, name in enumerate(names)}
    if len(ids) < len(names):
        raise ValueError("a piece is listed twice")
    unknown = next((i for i, piece in enumerate(pieces) if piece.kind == Kind.UNKNOWN), None)
    has_bytes = any(piece.kind == Kind.BYTE for piece in pieces)
    model = dict(type="Unigram", unk_id=unknown, byte_fallback=has_bytes)
    if is_unigram:
        model["vocab"] = [[n, piece.score] for n, piece in zip(names, pieces, strict=True)]
    else:
        unk_token = None if unknown is None else names[unknown]
        model = dict(type="BPE", byte_fallback=has_bytes, fuse_unk=True, unk_token=unk_token)
        model |= dict(vocab=ids, merges=_merges(pieces))
    blank = dict(String=" ")
    steps = [dict(type="Replace", pattern=blank, content=_BLANK)]
    if has_prefix:
        steps.insert(0, dict(type="Prepend", prepend=_BLANK))
    if is_trimmed:
        several = dict(type="Replace", pattern=dict(Regex=" {2,}"), content=" ")
        steps[:0] = [dict(type="Strip", strip_left=True, strip_right=True), several]
    if normalization:
        charsmap = base64.b64encode(normalization).decode()
        steps.insert(0, dict(type="Precompiled", precompiled_charsmap=charsmap))
    decoders = [dict(type="Replace", pattern=dict(String=_BLANK), content=" ")]
    decoders += [dict(type="ByteFallback"), dict(type="Fuse")]
    if has_prefix:
        decoders.append(dict(type="Strip", content=" ", start=1, stop=0))
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [
        dict(flags, id=i, content=names[i], special=piece.kind != Kind.USER_DEFINED)
        for i, piece in enumerate(pieces)
        if piece.kind in (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
    ]
    definition = dict(version="1.0", truncation=None, padding=None, added_tokens=added)
    definition |= dict(normalizer=dict(type="Sequence", normalizers=steps), pre_tokenizer=None)
    definition |= dict(post_processor=None, decoder=dict(type="Sequence", decoders=decoders))
    return json.dumps(definition | dict(model=model), ensure_ascii=False)


def _merges(pieces: list[Piece]) -> list[list[str]]:
    """Returns all pairs of pieces that join to a piece, in descending order of its score."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == Kind.NORMAL}
    ordered = sorted(scores, key=scores.get, reverse=True)
    splits = ((text[:i], text[i:]) for text in ordered for i in range(1, len(text)))
    return [[left, right] for left, right in splits if left in scores and right in scores]


def read(path: epath.Path) -> str:
    """Returns a `tokenizer.model` in the format of `tokenizer.json`.

    Raises:
      UserError: the file is damaged, or its algorithm is neither BPE nor Unigram.
    """
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer, normalizer = (
            dict(_fields(b"".join(value for number, value in fields if number == wanted)))
            for wanted in (2, 3)
        )
        algorithm = trainer.get(3, 1)
        if algorithm not in (1, 2) or trainer.get(24, 0):
            raise ValueError("it is neither a BPE nor a Unigram model with blanks before words")
        return tokenizer_json(
            pieces,
            is_unigram=algorithm == 1,
            has_prefix=bool(normalizer.get(3, 1)),
            is_trimmed=bool(normalizer.get(4, 1)),
            normalization=normalizer.get(2, b""),
        )
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise UserError(f"{path} cannot be read ({error}): download it again") from error


def _piece(content: bytes) -> Piece:
    fields = dict(_fields(content))
    return Piece(fields[1].decode(), fields.get(2, 0.0), Kind(fields.get(3, 1)))


def _fields(content: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields the number and value of each field of a protocol buffer."""
    position = 0

    def integer() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = content[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while position < len(content):
        number, kind = divmod(integer(), 8)
        if kind == 0:
            yield number, integer()
            continue
        size = {1: 8, 5: 4}.get(kind) or (integer() if kind == 2 else 0)
        value = content[position : position + size]
        if not kind or len(value) < size or kind not in (1, 2, 5):
            raise ValueError("it is not a protocol buffer")
        position += size
        yield number, struct.unpack("<f", value)[0] if kind == 5 else value
