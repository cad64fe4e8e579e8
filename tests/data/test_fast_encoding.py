"""The fast encoder gives the same ids as `tokenizers`, or does not exist."""

import itertools
import json
import random

import numpy as np
import pytest
import tokenizers

from kvjax.data import fast_encoding, tokenizer as tokenizer_lib
from tests import quick

SPLITS = {
    "ours": tokenizer_lib.SPLIT_PATTERN,
    "gpt2": fast_encoding.GPT2_SPLIT,
    "llama3": fast_encoding.PUBLISHED_SPLITS[1],
    "qwen2": fast_encoding.PUBLISHED_SPLITS[2],
}
# Positions of a character: in a word, at its ends, after a quote, in numbers, between blanks.
PLACES = ("a{0}b", ". {0}. a", "x'{0}y", "1{0}2{0}{0}34", " {0}{0}a\n{0}\n", "'{0}", "{0}'s")


@pytest.fixture(scope="module")
def trained(small_texts):
    """Returns a function from a split pattern's name to a tokenizer of 500 tokens."""

    def train(name):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        steps = tokenizers.pre_tokenizers
        if name == "gpt2":
            backend.pre_tokenizer = steps.ByteLevel(add_prefix_space=False)
        else:
            split = steps.Split(tokenizers.Regex(SPLITS[name]), behavior="isolated")
            bytes_ = steps.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = steps.Sequence([split, bytes_])
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<|bos|>"],
            initial_alphabet=steps.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(small_texts, trainer)
        return backend

    return train


def assert_equal(tokenizer: tokenizer_lib.Tokenizer, texts: list[str]) -> None:
    assert tokenizer._encode_fast is not None
    expected = tokenizer._backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, ids, encoding in zip(texts, tokenizer.encode_batch(texts), expected, strict=True):
        assert ids.dtype == np.uint32 and ids.tolist() == encoding.ids, text[:100]


SMALL = [(name, 0, 0x1000) for name in SPLITS]
LARGE = [(name, 0, 0x10000) for name in SPLITS]
LARGE += [("ours", p << 16, (p + 1) << 16) for p in (1, 2, 3, 4, 14, 16)]  # 5 to 13 are empty


@pytest.mark.parametrize("name, first, stop", quick.only(SMALL[:2], SMALL + LARGE))
def test_every_character_in_every_place(trained, name, first, stop):
    tokenizer = tokenizer_lib.Tokenizer(trained(name), name)
    characters = [chr(c) for c in range(first, stop) if not 0xD800 <= c < 0xE000]
    for place in PLACES:  # 64 characters per text: a text costs more than its characters
        texts = ["\n".join(map(place.format, line)) for line in itertools.batched(characters, 64)]
        assert_equal(tokenizer, texts)


@pytest.mark.parametrize("name", SPLITS)
def test_prose_code_long_words_and_noise(trained, name, small_texts):
    tokenizer, draw = tokenizer_lib.Tokenizer(trained(name), name), random.Random(0)
    noise = ["".join(draw.choices("aeht \n\t'.,1é🙂<|bos|>\r", k=200)) for _ in range(300)]
    with open(__file__) as file:
        code = file.read()
    words = ["the" * 20_000, "a" * 20_000, " " * 5_000, "1" * 999, "\n" * 999, "=" * 5_000]
    assert_equal(tokenizer, [*small_texts, code, *words, *noise, "", "<|bos|>"])


def test_bytes_alone():
    assert_equal(tokenizer_lib.byte_tokenizer(), ["the king's", "é🙂", "", "<|bos|>"])


def test_there_is_none_where_ids_might_differ(trained):
    """Changes one option of a tokenizer that has a fast encoder."""
    definition = json.loads(trained("ours").to_str())

    def has_one(change) -> bool:
        other = json.loads(json.dumps(definition))
        change(other)
        backend = tokenizers.Tokenizer.from_str(json.dumps(other))
        return tokenizer_lib.Tokenizer(backend, "")._encode_fast is not None

    def split(d):
        return d["pre_tokenizer"]["pretokenizers"][0]

    def added(d):
        d["added_tokens"].append(dict(d["added_tokens"][0], id=500, content="x y"))

    assert has_one(lambda d: None) and has_one(added)
    assert not has_one(lambda d: added(d) or d["added_tokens"][1].update(special=False))
    assert not has_one(lambda d: split(d)["pattern"].update(Regex=r"\p{L}+"))
    assert not has_one(lambda d: split(d).update(behavior="Removed"))
    assert not has_one(lambda d: split(d).update(invert=True))
    assert not has_one(lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True))
    assert not has_one(lambda d: d["model"].update(dropout=0.1))
    assert not has_one(lambda d: d["model"]["merges"].reverse())
    assert not has_one(lambda d: d["model"]["merges"].pop())


def test_a_token_that_merging_never_makes():
    """ "abc" is (ab, c), but b and c merge first: `tiktoken` would make it of (a, bc)."""
    alphabet = tokenizer_lib._byte_characters()
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]
    vocab = {token: i for i, token in enumerate([*alphabet, "bc", "ab", "abc"])}
    model = dict(type="BPE", vocab=vocab, merges=merges)
    token_bytes = {token: token.encode("latin-1") for token in alphabet if token.isascii()}
    token_bytes |= {c: bytes([i]) for i, c in enumerate(alphabet)}
    token_bytes |= {token: token.encode() for token in ("bc", "ab", "abc")}
    assert fast_encoding._ids(model, token_bytes) is None
    del vocab["abc"], merges[2], token_bytes["abc"]
    assert fast_encoding._ids(model, token_bytes) is not None
