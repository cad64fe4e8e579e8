"""SentencePiece tokenizers, which write blanks as "▁" and unknown characters as tokens of one byte.

Most put a blank before a text, which decoding drops. Some first normalise the text. Functions take
and return definitions, the content of `tokenizer.json`.
"""

from collections.abc import Collection, Mapping
import re

BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of one byte
_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
# Places of a text: at the start of a prompt or document, after a control token, or inside a
# document. Some tokenizers put a blank before texts in the first place only, some in the first two.
POSITIONS = ("start", "control", "inside")


def steps(definition: Mapping, part: str, several: str) -> list[dict]:
    """Returns the steps of a part of a definition; [] if it is null.

    Args:
      part: key of the part, such as "decoder".
      several: key of the list of steps, if the part has several.
    """
    step = definition.get(part)
    return step.get(several, [step]) if step else []


def is_sentencepiece(definition: Mapping) -> bool:
    """Returns True for a BPE or Unigram model whose decoder writes "▁" as a blank."""
    kinds = {step["type"] for step in steps(definition, "decoder", "decoders")}
    writes_blanks = kinds <= _DECODERS and kinds & {"Replace", "Metaspace"}
    return bool(writes_blanks) and definition["model"]["type"] in ("BPE", "Unigram")


def has_bytes(definition: Mapping) -> bool:
    """Returns True if tokens such as <0x0A> decode to bytes."""
    return any(s["type"] == "ByteFallback" for s in steps(definition, "decoder", "decoders"))


def at(definition: Mapping, position: str) -> dict:
    """Returns a definition that encodes every text as if it stood at one of `POSITIONS`."""
    changed = dict(definition)
    if position == "inside":
        kept = steps(definition, "normalizer", "normalizers")
        kept = [step for step in kept if step["type"] != "Prepend"]
        changed["normalizer"] = dict(type="Sequence", normalizers=kept) if kept else None
    split = steps(definition, "pre_tokenizer", "pretokenizers")
    # After a split into words, "always" means before every word.
    if split and split[0]["type"] == "Metaspace":
        schemes = dict(control=("first",), inside=("first", "always")).get(position, ())
        if split[0]["prepend_scheme"] in schemes:
            split = [dict(split[0], prepend_scheme="never"), *split[1:]]
            changed["pre_tokenizer"] = dict(type="Sequence", pretokenizers=split)
    return changed


def without_controls(definition: Mapping, names: Collection[str]) -> dict:
    """Returns a definition that never encodes a text as one of the named tokens.

    Gives these tokens names with a blank, which no normalized text has, and removes the merges that
    make them.
    """
    model, added = definition["model"], definition["added_tokens"]
    renamed = {name: f"\ufdd0 {i}" for i, name in enumerate(sorted(names))}
    listed = [
        dict(t, content=renamed[t["content"]], special=True) if t["content"] in renamed else t
        for t in added
    ]
    if model["type"] == "Unigram":
        changes = dict(vocab=[[renamed.get(name, name), score] for name, score in model["vocab"]])
    else:
        changes = dict(vocab={renamed.get(name, name): i for name, i in model["vocab"].items()})
        changes["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
        merges = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        changes["merges"] = [
            pair for pair in merges if renamed.keys().isdisjoint((*pair, "".join(pair)))
        ]
    return dict(definition, added_tokens=listed, model=model | changes)
