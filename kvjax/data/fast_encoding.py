"""Encoding by `tiktoken`, seven times as fast as by `tokenizers`, where the ids are the same.

`tokenizers` merges the pairs of its list, first those that stand first in it; `tiktoken` merges any
pair whose text is a token, first those of the lowest id. Both give the same ids if merges are in
the order of the ids they make, each id made once, and every token's own text is encoded as it: the
tokens within a span of text that nothing crosses depend on that span alone, so a pair that spells a
token is always the one that the list has.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
from typing import Any

import numpy as np
import tiktoken
import tokenizers

from kvjax.foundation import runtime

# How GPT-2, Llama 3 and Qwen 2 split a text into words. Two libraries of regular expressions must
# agree on them: the tests compare them on every character.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED_SPLITS = (GPT2_SPLIT, _LLAMA3 % "{1,3}", _LLAMA3 % "")

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def encoder(
    definition: Mapping[str, Any],
    token_bytes: Mapping[str, bytes],
    splits: Sequence[str],
    threads: int = 0,
) -> Encode | None:
    """A function of texts that gives the ids of each, uint32, encoded on all cores.

    None where `tokenizers` might give others.

    Args:
      definition: of the tokenizer, as in `tokenizer.json`.
      token_bytes: what the tokens of its vocabulary stand for, all but the added ones.
      splits: regular expressions that both libraries read alike.
      threads: that encode; 0: as many as there are cores.
    """
    split = _split(definition["pre_tokenizer"] or {})
    if split not in splits or not all(token["special"] for token in definition["added_tokens"]):
        return None
    ids = _ids(definition["model"], token_bytes)
    if ids is None:
        return None
    encoding = tiktoken.Encoding("", pat_str=split, mergeable_ranks=ids, special_tokens={})
    encode = lambda text: encoding.encode_to_numpy(text, disallowed_special=())
    if threads == 1:
        return lambda texts: list(map(encode, texts))
    pool = concurrent.futures.ThreadPoolExecutor(threads or runtime.cores())
    return lambda texts: list(pool.map(encode, texts))  # encoding leaves Python's lock


def _split(steps: Mapping[str, Any]) -> str | None:
    """The regular expression that cuts words, or None for any other way."""
    steps = steps.get("pretokenizers", [steps])
    if len(steps) == 1 and steps[0].get("use_regex"):
        return GPT2_SPLIT
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[1].get("use_regex", True):
        return None
    how = steps[0]["behavior"], steps[0]["invert"]
    return steps[0]["pattern"].get("Regex") if how == ("Isolated", False) else None


def _ids(model: Mapping[str, Any], token_bytes: Mapping[str, bytes]) -> dict[bytes, int] | None:
    """By bytes, the id of each token; None unless merging by id is merging by the list."""
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(map(model.get, (*options, "byte_fallback", "fuse_unk"))):
        return None
    vocab = {token: model["vocab"][token] for token in token_bytes if token in model["vocab"]}
    ids = {token_bytes[token]: i for token, i in vocab.items()}
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    made = [vocab.get("".join(pair), -1) for pair in pairs]
    if made != sorted(set(made)) or len(made) + 256 != len(vocab) or len(ids) != len(vocab):
        return None
    merging = tokenizers.models.BPE(vocab, pairs)
    alone = all([t.value for t in merging.tokenize(token)] == [token] for token in vocab)
    return ids if alone else None
