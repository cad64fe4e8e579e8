"""Tokens round-trip, count their bytes, and are deterministic in the texts."""

import json
import subprocess
import sys

from hypothesis import example, given, strategies as st
import numpy as np
import pytest
import tokenizers

from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import DataError


@pytest.fixture(scope="module")
def bpe(small_texts):
    return tokenizer_lib.train(small_texts, 500)


@pytest.fixture(scope="module")
def published(tmp_path_factory, small_texts):
    """A published tokenizer.json: digits split, a token with a space, a post-processor."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = tokenizers.pre_tokenizers
    backend.pre_tokenizer = steps.Sequence([steps.Digits(True), steps.ByteLevel(False)])
    backend.decoder = tokenizers.decoders.ByteLevel()
    specials = ["<|im_end|>", "<|endoftext|>"]
    alphabet = steps.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(small_texts, trainer)
    backend.add_tokens([tokenizers.AddedToken("é é", normalized=False)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", backend.token_to_id("<|im_end|>"))]
    )
    backend.enable_truncation(3)
    path = tmp_path_factory.mktemp("published") / "tokenizer.json"
    backend.save(str(path))
    return tokenizer_lib.load(path)


@pytest.fixture(scope="module")
def by_kind(bpe, published):
    return {"bpe": bpe, "byte": tokenizer_lib.byte_tokenizer(), "published": published}


@pytest.mark.parametrize("kind", ["bpe", "byte", "published"])
@example(text="é é <|endoftext|>")  # An added token that is not special.
@given(text=st.text() | st.text(alphabet="eé <|bos>im_nd🙂1\n", max_size=80))
def test_tokens_give_back_the_text_and_its_bytes(by_kind, kind, text):
    tokenizer = by_kind[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.bos_id not in ids
    batch = [batched.tolist() for batched in tokenizer.encode_batch(["a", text, ""])]
    assert batch == [tokenizer.encode("a"), ids, []]


@pytest.mark.parametrize("kind", ["bpe", "byte", "published"])
def test_specials_are_written_by_name_and_have_no_bytes(by_kind, kind):
    tokenizer = by_kind[kind]
    name = "<|endoftext|>" if kind == "published" else "<|bos|>"
    ids = [tokenizer.bos_id, *tokenizer.encode(name)]
    assert len(ids) > 2  # A name in a text is not special.
    assert tokenizer.decode(ids) == 2 * name
    bytes_V = tokenizer.token_bytes()
    assert bytes_V.dtype == np.int32
    assert bytes_V.shape == (tokenizer.vocab_size,)
    specials = 2 if kind == "published" else 1
    assert bytes_V[tokenizer.bos_id] == 0
    assert (bytes_V == 0).sum() == specials


CHAT = tokenizer_lib.CONVERSATION_SPECIALS


@pytest.mark.parametrize("kind", ["bpe", "byte", "published"])
def test_more_specials_stand_behind_all_ids(by_kind, kind):
    """Texts are encoded as before, even with the names in them; a second call adds nothing."""
    before, text = by_kind[kind], "é é eto <|user_start|> 12 <|bos|>"
    lacking = [name for name in CHAT if before.special(name) is None]
    tokenizer = before.with_specials(CHAT)
    ids = [tokenizer.special(name) for name in lacking]
    assert ids == [*range(before.vocab_size, tokenizer.vocab_size)] and len(ids) >= 8
    assert tokenizer.vocabulary().items() >= before.vocabulary().items()
    assert tokenizer.encode(text) == before.encode(text)
    assert [x.tolist() for x in tokenizer.encode_batch([text, ""])] == [before.encode(text), []]
    assert tokenizer.decode(ids) == "".join(lacking) and not tokenizer.token_bytes()[ids].any()
    assert tokenizer.decode([tokenizer.bos_id]) == "<|bos|>"
    assert tokenizer.with_specials(CHAT).to_json() == tokenizer.to_json()
    assert tokenizer_lib.from_json(tokenizer.to_json(), "a name").to_json() == tokenizer.to_json()


def test_more_specials_where_the_vocabulary_has_holes(published, bpe):
    """New special tokens take ids after the last one."""
    definition = json.loads(published.to_json())
    vocab = definition["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    definition["model"]["merges"] = [m for m in definition["model"]["merges"] if "".join(m) != last]
    vocab[last] += 100
    definition["added_tokens"] = [t for t in definition["added_tokens"] if t["special"]]
    holed = tokenizer_lib.from_json(json.dumps(definition), "a name")
    grown = holed.with_specials(CHAT)
    ids = [grown.special(name) for name in CHAT]
    assert ids == [*range(holed.vocab_size, holed.vocab_size + 9)] and holed.vocab_size > 450
    assert grown.encode("one é") == holed.encode("one é")
    assert (grown.token_bytes() == 0).sum() == (holed.token_bytes() == 0).sum() + 9


def test_control_tokens_are_encoded_as_the_characters_they_are_made_of(bpe):
    """Both added tokens and words of the vocabulary, even if the tokenizer was used before."""
    backend = tokenizers.Tokenizer.from_str(bpe.to_json())
    backend.add_tokens([tokenizers.AddedToken("e e", normalized=False)])
    before, text = tokenizer_lib.from_json(backend.to_str(), "a name", threads=1), "e e <|bos|> t"
    before.ends = (7,)
    assert 500 in before.encode(text) and before._encode_fast is None
    for names, size in ((["e e"], 501), (["e e", "<|x|>"], 502)):
        grown = before.controlled(names)
        assert grown.encode(text) == bpe.encode(text) == grown.encode_batch([text])[0].tolist()
        assert grown._encode_fast is not None or size == 502
        assert grown.controls == {"<|bos|>", *names} and grown.vocab_size == size
        assert [grown.special(name) for name in names] == [500, 501][: len(names)]
        assert grown.written_out(text) == ["<|bos|>", "e e"] and grown.ends == (7,)
        assert grown.decode([500]) == "e e" and grown.token_bytes()[500] == 3
        unchanged = grown.controlled(names[:1])
        assert unchanged is not grown and unchanged.controls == grown.controls
    assert 500 in before.encode(text) and before.special("e e") is None


def test_a_token_of_such_a_name_becomes_special(bpe):
    backend = tokenizers.Tokenizer.from_str(bpe.to_json())
    backend.add_tokens([tokenizers.AddedToken("<|user_start|>", normalized=False)])
    before = tokenizer_lib.from_json(backend.to_str(), "a name")
    assert before.special("<|user_start|>") is None
    grown = before.with_specials(CHAT)
    assert (grown.special("<|user_start|>"), grown.vocab_size) == (500, 508)
    assert 500 not in grown.encode("<|user_start|>")


def test_byte_tokenizer_is_bytes():
    tokenizer = tokenizer_lib.byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (257, 256)
    assert tokenizer.encode("aé\n") == list("aé\n".encode())


def test_trained_vocabulary_is_specials_then_bytes_then_merges(bpe):
    assert (bpe.vocab_size, bpe.bos_id) == (500, 0)
    assert sorted(bpe.decode([i]) for i in range(1, 257) if bpe.decode([i]) != "\ufffd") == [
        chr(i) for i in range(128)
    ]
    specials = ("<|bos|>", "<|user|>")
    several = tokenizer_lib.train(["aa bb aa bb"], 260, specials)
    assert (several.bos_id, several.decode([0, 1])) == (0, "<|bos|><|user|>")


def test_split_pattern_keeps_words_and_pairs_of_digits():
    text = "I'll pay 12345 for it... \n\n Don't"
    splits = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(tokenizer_lib.SPLIT_PATTERN), behavior="isolated"
    ).pre_tokenize_str(text)
    words = ["I", "'ll", " pay", " ", "12", "34", "5", " for", " it", "...", " \n\n", " Don", "'t"]
    assert [word for word, _ in splits] == words


def test_training_is_deterministic(bpe, small_texts, tmp_path):
    """Another process, where hashes of strings differ, trains the same tokenizer."""
    (tmp_path / "texts.json").write_text(json.dumps(small_texts))
    code = (
        "import json, sys; from kvjax.data import tokenizer\n"
        "tokenizer.train(json.load(open(sys.argv[1])), 500).save(sys.argv[2])"
    )
    paths = [str(tmp_path / name) for name in ("texts.json", "tokenizer.json")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, cwd=ROOT)
    assert (tmp_path / "tokenizer.json").read_text() == bpe.to_json()


def test_vocabulary_beyond_the_text_is_refused():
    message = r"vocab_size = 1000: must be at most (\d+) for this training split.* more text"
    with pytest.raises(ValueError, match=message):
        tokenizer_lib.train(["a few words, a few words"], 1000)


def test_normalizer_is_left_out(bpe, tmp_path):
    definition = json.loads(bpe.to_json()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "nfc.json").write_text(json.dumps(definition))
    decomposed = "e\u0301"
    tokenizer = tokenizer_lib.load(tmp_path / "nfc.json")
    assert tokenizer.decode(tokenizer.encode(decomposed)) == decomposed


OTHER = "<｜begin▁of▁sentence｜>"


@pytest.mark.parametrize("before", [None, tokenizers.processors.ByteLevel(trim_offsets=False)])
def test_a_special_of_another_name_opens_documents(bpe, before):
    """A new step of the post-processor names the token; texts are encoded as before."""
    backend = tokenizers.Tokenizer.from_str(bpe.to_json().replace(tokenizer_lib.BOS, OTHER))
    backend.add_special_tokens(["<z>"])
    backend.post_processor = before or backend.post_processor
    text = tokenizer_lib.opened_by(backend.to_str(), OTHER)
    tokenizer = tokenizer_lib.from_json(text, "a name")
    assert (tokenizer.bos_id, tokenizer.decode([0])) == (0, OTHER)
    assert tokenizer.encode("one") == bpe.encode("one")
    assert tokenizer_lib.from_json(tokenizer.to_json(), "a name").bos_id == 0
    assert tokenizers.Tokenizer.from_str(text).encode("one").ids == bpe.encode("one")
    kinds = [step["type"] for step in json.loads(text)["post_processor"]["processors"]]
    assert kinds == ["TemplateProcessing"] + (["ByteLevel"] if before else [])
    assert tokenizer_lib.opened_by(text, "<z>") == text  # it has a BOS token already


def test_a_special_put_before_every_text_opens_documents(bpe):
    backend = tokenizers.Tokenizer.from_str(bpe.to_json().replace(tokenizer_lib.BOS, OTHER))

    def template(*pieces):
        return tokenizers.processors.TemplateProcessing(
            single=" ".join(pieces), pair="$A $B", special_tokens=[(OTHER, 0)]
        )

    backend.post_processor = template(OTHER, "$A")
    assert tokenizer_lib.opened_by(backend.to_str(), OTHER) == backend.to_str()
    assert tokenizer_lib.from_json(backend.to_str(), "a name").bos_id == 0
    backend.post_processor = template("$A", OTHER)  # it ends texts
    with pytest.raises(DataError, match="no special token opens a document"):
        tokenizer_lib.from_json(backend.to_str(), "a name")


def test_known_names_and_tokens_that_are_not_there_change_no_tokenizer(bpe):
    several = tokenizer_lib.train(["aa bb aa bb"], 260, ("<|user|>", "<|bos|>")).to_json()
    assert tokenizer_lib.opened_by(several, "<|user|>") == several
    assert tokenizer_lib.opened_by(several, None) == several
    other = bpe.to_json().replace(tokenizer_lib.BOS, OTHER)
    assert tokenizer_lib.opened_by(other, "<none>") == other


def test_an_added_token_that_opens_documents_becomes_special():
    """transformers makes it special too; a template that names it stays."""
    text = tokenizer_lib.byte_tokenizer().to_json().replace(tokenizer_lib.BOS, OTHER)
    definition = json.loads(text)
    definition["added_tokens"][0].update(special=False)
    first = [{"SpecialToken": {"id": OTHER, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    named = {OTHER: dict(id=OTHER, ids=[256], tokens=[OTHER])}
    step = dict(type="TemplateProcessing", single=first, pair=first, special_tokens=named)
    for processor, ids in ((None, [97]), (step, [256, 97])):
        text = json.dumps(definition | dict(post_processor=processor))
        text = tokenizer_lib.opened_by(text, OTHER)
        assert processor is None or json.loads(text)["post_processor"] == step
        assert tokenizers.Tokenizer.from_str(text).encode("a").ids == ids
        tokenizer = tokenizer_lib.from_json(text, "a name")
        assert tokenizer.bos_id == 256 and tokenizer.token_bytes()[256] == 0
        assert 256 not in tokenizer.encode(OTHER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": None}, "must be byte-level"),
        (
            {
                "pre_tokenizer": {
                    "type": "Metaspace",
                    "replacement": "_",
                    "prepend_scheme": "always",
                }
            },
            "must be byte-level",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": True,
                }
            },
            "without prefix space",
        ),
        ({"added_tokens": []}, r"one of <\|bos\|>.* its special tokens are none"),
        ({"model": 1}, "is not a tokenizer.json"),
        (  # makes the library panic
            {"model": dict(type="BPE", vocab={"a": 0, "b": 0}, merges=[["a", "b"]])},
            "is not a tokenizer.json.* out of range",
        ),
    ],
)
def test_unusable_tokenizer_is_named(bpe, tmp_path, change, message):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(json.loads(bpe.to_json()) | change))
    with pytest.raises(ValueError, match=rf"other\.json.*{message}"):
        tokenizer_lib.load(path)


def test_a_text_that_the_library_gives_up_on_is_named(bpe):
    """Covers panics of both libraries; texts on which `tiktoken` fails go to `tokenizers`."""
    definition = json.loads(bpe.to_json())
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"
    backtracking, text = tokenizer_lib.from_json(json.dumps(definition), "a name"), "a" * 24 + "x"
    for encode in (backtracking.encode, lambda text: backtracking.encode_batch(["ok", text])):
        with pytest.raises(DataError, match=r"a text of 25 characters cannot be tokenized .*'aaaa"):
            encode(text)
    other = tokenizer_lib.from_json(bpe.to_json(), "a name")
    other._encode_fast = lambda texts: [].index(0)  # a ValueError
    assert other.encode_batch(["the cat"])[0].tolist() == bpe.encode("the cat")


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json'.*no such file"):
        tokenizer_lib.load(tmp_path / "none.json")
