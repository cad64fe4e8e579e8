"""Small SentencePiece tokenizers, trained by the `tokenizers` library, as published ones are."""

import json
import struct

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

SPECIALS = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ("llama2", "metaspace", "always", "gemma", "unigram")
TEXT = [
    "the cat sat on the mat, and the dog ate the rest of what the cat had left there",
    "of all that is said, what is heard of it? [INST] the <s> and the </s> of a text [/INST]",
    "def main(x):\n    return x  # the end",
]
# With emoji, code, combining marks, runs of blanks, names of tokens, and leading blanks.
HARD = [
    "",
    " ",
    "  leading blanks",
    "the cat",
    " the",
    "a   b\t\tc\n\n\n  d ",
    "👩‍👩‍👧 of 🇩🇪\U0001f600",
    "e\u0301 n\u0303 \u0301\u0301",
    "if x:\n\treturn {'a': [1, 2]}",
    "<s> the </s><unk><0x0A>[INST]",
    "漢字かな交じり",
    "Ａ ﬁ ½",
    "a\0b",
]


def backend(kind: str) -> tokenizers.Tokenizer:
    """Returns a tokenizer built as Llama 2's, later ones with Metaspace, Gemma's, or a Unigram."""
    trained = tokenizers.SentencePieceUnigramTokenizer()
    if kind == "unigram":
        trained.train_from_iterator(
            TEXT, vocab_size=90, special_tokens=list(SPECIALS), unk_token="<unk>"
        )
    else:
        trained = tokenizers.SentencePieceBPETokenizer()
        trained.train_from_iterator(
            TEXT, vocab_size=420, min_frequency=1, special_tokens=[*SPECIALS, *BYTES]
        )
    definition = json.loads(trained.to_str())
    model = definition["model"] | dict(byte_fallback=kind != "unigram")
    if kind != "unigram":
        # A merge that makes a control token, as in files that were converted from scores.
        last = max(model["vocab"].values())
        model["vocab"] |= {"<s": last + 1}
        model["merges"] = [*model["merges"], ["<", "s"], ["<s", ">"]]
        model |= dict(unk_token="<unk>", fuse_unk=True)
    special = [token for token in definition["added_tokens"] if token["content"] in SPECIALS]
    definition |= dict(model=model, added_tokens=special, normalizer=None)
    published = tokenizers.Tokenizer.from_str(json.dumps(definition))
    published.pre_tokenizer = None
    blanks = normalizers.Replace(" ", "▁")
    written = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama2":
        published.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
    elif kind == "gemma":
        published.normalizer = blanks
    else:
        scheme = "first" if kind == "metaspace" else "always"
        published.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if kind != "gemma":
        written.append(decoders.Strip(" ", 1, 0))
    published.decoder = decoders.Sequence(written)
    return published


def pieces() -> list[tuple[str, float, int]]:
    """Returns text, score and kind of the pieces of `backend("llama2")`."""
    model = json.loads(backend("llama2").to_str())["model"]
    ranks = {"".join(pair): rank for rank, pair in enumerate(model["merges"])}
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3} | dict.fromkeys(BYTES, 6)
    return [
        (text, -float(ranks.get(text, 1000)), kinds.get(text, 1))
        for text in sorted(model["vocab"], key=model["vocab"].get)
    ]


def model_file(listed: list[tuple[str, float, int]], algorithm: int = 2) -> bytes:
    """Returns a tokenizer.model of pieces: a BPE (2) that keeps blanks, or another algorithm."""

    def message(number: int, content: bytes) -> bytes:
        size = len(content)
        length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
        return bytes([number << 3 | 2]) + length + content

    content = b""
    for text, score, kind in listed:
        fields = message(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        content += message(1, fields + bytes([3 << 3, kind]))
    has_bytes = any(kind == 6 for _, _, kind in listed)
    trainer = bytes([3 << 3, algorithm, 0x98, 0x02, has_bytes])  # fields 3 and 35
    return content + message(2, trainer) + message(3, bytes([4 << 3, 0]))  # remove no blanks
