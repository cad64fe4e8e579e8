"""Tokenizers: trained here (byte-level BPEs), of bytes alone, or loaded from a `tokenizer.json`.

A loaded tokenizer must be a byte-level BPE, or one of SentencePiece (see `sentence_pieces`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import copy
import functools
import json
import os

# By default `tokenizers` disables its threads after a fork, since it is unsafe to fork while they
# encode. kvjax never does.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from etils import epath
import numpy as np
import tokenizers

from kvjax.data import fast_encoding, sentence_pieces
from kvjax.foundation.errors import DataError, MissingDataError, first_line, panics_as_errors, warn

BOS = "<|bos|>"
# Special tokens of rendered conversations, in nanochat's order (see `kvjax.conversation`).
CONVERSATION_SPECIALS = (
    BOS,
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
SPECIALS = {"bos": (BOS,), "chat": CONVERSATION_SPECIALS}  # by config.data.specials
# Names that published tokenizers give to the token that opens a document. The first one present is
# used, or else the special token that the post-processor names (`_template_bos`).
_BOS_NAMES = (BOS, "<|begin_of_text|>", "<bos>", "<s>", "<|endoftext|>")

# GPT-4's pattern (tiktoken, cl100k_base), but with groups of at most two digits instead of three,
# which suits small vocabularies better (nanochat).
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _byte_characters() -> list[str]:
    """Returns the printable character of each byte in a byte-level vocabulary (GPT-2)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    characters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in characters)
    characters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [characters[byte] for byte in range(256)]


def _specials(definition: dict) -> set[str]:
    return {token["content"] for token in definition["added_tokens"] if token["special"]}


def _bos_name(definition: dict) -> str | None:
    """Returns the special token that opens a document, from the definition in tokenizer.json."""
    specials = _specials(definition)
    steps = sentence_pieces.steps(definition, "post_processor", "processors")
    templates = [step for step in steps if step.get("type") == "TemplateProcessing"]
    names = (*_BOS_NAMES, *map(_template_bos, templates))
    return next((bos for bos in names if bos in specials), None)


def _template_bos(template: dict) -> str | None:
    """Returns the special token that a template puts before a text, or that `opened_by` stored."""
    single = template["single"]
    if single and "SpecialToken" in single[0]:
        return single[0]["SpecialToken"]["id"]
    inserts_special = any("SpecialToken" in piece for piece in (*single, *template["pair"]))
    names = list(template["special_tokens"])
    return names[0] if len(names) == 1 and not inserts_special else None


def opened_by(text: str, bos: str | None) -> str:
    """Returns a tokenizer.json in which `bos` opens documents, unless it has such a token.

    A post-processor step is added that names the token, but does not insert it, so that other
    libraries encode as before.
    """
    definition = json.loads(text)
    added = definition.get("added_tokens") or []
    token = next((entry for entry in added if entry["content"] == bos), None)
    if token is None or _bos_name(definition) is not None:
        return text
    token["special"] = True
    if _bos_name(definition) is None:  # `_BOS_NAMES` lacks its name
        first, second = dict(id="A", type_id=0), dict(id="B", type_id=1)
        single, pair = [{"Sequence": first}], [{"Sequence": first}, {"Sequence": second}]
        step = dict(type="TemplateProcessing", single=single, pair=pair)
        step["special_tokens"] = {bos: dict(id=bos, ids=[token["id"]], tokens=[bos])}
        steps = [step, *sentence_pieces.steps(definition, "post_processor", "processors")]
        definition["post_processor"] = dict(type="Sequence", processors=steps)
    return json.dumps(definition, ensure_ascii=False)


def with_added(definition: Mapping, tokens: Iterable[Mapping]) -> dict:
    """Returns a tokenizer.json with more added tokens; they replace any of the same content.

    Args:
      tokens: as in `added_tokens`, with id, content and special; other flags are optional.
    """
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    tokens = {token["content"]: flags | dict(token) for token in tokens}
    before = definition.get("added_tokens") or []
    by_name = {token["content"]: token for token in before} | tokens
    added = sorted(by_name.values(), key=lambda token: token["id"])
    # The library gives new ids to added tokens that the model's vocabulary lacks. These ids are
    # wrong if the vocabulary's have gaps.
    vocab = definition["model"]["vocab"]
    if isinstance(vocab, dict):  # a Unigram's list has no gaps
        vocab = vocab | {token["content"]: token["id"] for token in added}
    return dict(definition, added_tokens=added, model=definition["model"] | dict(vocab=vocab))


class Tokenizer:
    """Converts text to token ids and back.

    The name of a control token is encoded as ordinary characters if it occurs in a text. The tokens
    of a byte-level tokenizer contain exactly the UTF-8 bytes of the text. SentencePiece may lose
    characters, and puts a blank before the text, which decoding drops.

    Attributes:
      bos_id: id of the token that opens a document.
      controls: names of the control tokens: special tokens, and tokens added by `controlled`.
      ends: ids of further tokens that end a text, as published with a model.
      keeps_bytes: True if the tokens contain exactly the bytes of a text (byte-level).
    """

    def __init__(self, backend: tokenizers.Tokenizer, name: str, threads: int = 0):
        """Wraps a tokenizer of the `tokenizers` library.

        Args:
          backend: must be byte-level without prefix space, or SentencePiece's.
          name: origin of the tokenizer, for messages.
          threads: number of threads that encode a batch; 0: one per core.

        Raises:
          ValueError: the tokenizer is of another kind, or no token opens a document.
        """
        definition = json.loads(backend.to_str())
        steps = sentence_pieces.steps(definition, "pre_tokenizer", "pretokenizers")
        levels = [step for step in steps if step["type"] == "ByteLevel"]
        self._is_byte_level = bool(levels) and not any(step["add_prefix_space"] for step in levels)
        if not self._is_byte_level and (levels or not sentence_pieces.is_sentencepiece(definition)):
            raise DataError(
                f"{name}: the tokenizer must be byte-level without prefix space (as GPT-2, Llama 3,"
                " Qwen, SmolLM) or SentencePiece's (as Llama 2, Mistral, Gemma); its pre_tokenizer"
                f" is {definition['pre_tokenizer']}, its decoder {definition['decoder']}."
            )
        self.keeps_bytes = self._is_byte_level
        self._has_byte_tokens = sentence_pieces.has_bytes(definition)
        if self._is_byte_level and definition["normalizer"] is not None:
            kind = definition["normalizer"]["type"]
            warn(f"{name}: its normalizer {kind} is not used: texts are encoded byte for byte")
            backend.normalizer = None
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        specials = _specials(definition)
        bos = _bos_name(definition)
        if bos is None:
            raise DataError(
                f"{name}: no special token opens a document: it needs one of "
                f"{', '.join(_BOS_NAMES)}, or one that the post_processor puts before a text; its "
                f"special tokens are {sorted(specials) or 'none'}."
            )
        self._backend, self._threads = backend, threads
        self._specials = specials
        self.controls = frozenset(specials)
        self.bos_id: int = backend.token_to_id(bos)
        self._vocabulary: dict[str, int] = backend.get_vocab()
        self.vocab_size: int = 1 + max(self._vocabulary.values())
        self.ends: tuple[int, ...] = ()

    def written_out(self, text: str) -> list[str]:
        """Returns the control tokens whose names occur in a text."""
        return sorted(name for name in self.controls if name in text)

    def special(self, name: str) -> int | None:
        """Returns the id of a control token; None if no control token has that name."""
        return self._backend.token_to_id(name) if name in self.controls else None

    def controlled(self, names: Collection[str]) -> "Tokenizer":
        """Returns this tokenizer with more control tokens; no text is encoded as a control token.

        Added tokens keep their flags, so that other libraries encode as before. An ordinary token
        of the vocabulary becomes a special token.
        """
        if self.controls.issuperset(names):
            return copy.copy(self)
        is_special = {name: token.special for name, token in self.added_tokens().items()}
        ordinary = [name for name in names if name not in is_special]
        tokenizer = self.with_specials(ordinary) if ordinary else copy.copy(self)
        tokenizer.controls = self.controls | set(names)
        for cached in ("_encoders", "_encode_fast"):
            tokenizer.__dict__.pop(cached, None)
        return tokenizer

    def with_specials(self, names: Sequence[str]) -> "Tokenizer":
        """Returns this tokenizer with more special tokens, with ids after the last one.

        Gaps in the ids of a published vocabulary remain. If an ordinary token has one of the names,
        it becomes a special token and keeps its id.
        """
        added, vocab = self._specials, self._vocabulary
        new = [name for name in names if name not in vocab]
        ids = vocab | {name: self.vocab_size + i for i, name in enumerate(new)}
        tokens = [dict(id=ids[n], content=n, special=True) for n in names if n not in added]
        definition = with_added(json.loads(self.to_json()), tokens)
        grown = from_json(
            json.dumps(definition, ensure_ascii=False), "the tokenizer", self._threads
        )
        grown.ends = self.ends
        return grown

    def encode(self, text: str, position: str = "start") -> list[int]:
        """Returns the token ids of a text, without BOS.

        Args:
          position: place of the text, one of `sentence_pieces.POSITIONS`.

        Raises:
          DataError: the library fails, for example on millions of blanks in a row.
        """
        try:
            with panics_as_errors():
                return self._encoder(position).encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"a text of {len(text):,} characters cannot be tokenized ({first_line(error)}); a "
                "very long run of blanks or the tokenizer's pattern may be the cause. The text "
                f"begins {text[:40]!r}"
            ) from error

    def encode_batch(self, texts: Sequence[str], position: str = "start") -> list[np.ndarray]:
        """Returns the token ids of each text, uint32; encodes in parallel."""
        try:
            with panics_as_errors():
                if self._encode_fast is not None:
                    return self._encode_fast(texts)
                encoder = self._encoder(position)
                encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
                return [np.array(encoding.ids, np.uint32) for encoding in encodings]
        except (ValueError, RuntimeError):
            # `encode` accepts longer texts; its error quotes the text that fails.
            return [np.array(self.encode(text, position), np.uint32) for text in texts]

    def _encoder(self, position: str) -> tokenizers.Tokenizer:
        """Returns the library's tokenizer, changed so that no text becomes a control token."""
        position = "start" if self._is_byte_level else position
        if position not in self._encoders:
            self._encoders[position] = self._new_encoder(position)
        return self._encoders[position]

    @functools.cached_property
    def _encoders(self) -> dict[str, tokenizers.Tokenizer]:
        """Encoders by position, created on first use."""
        return {}

    def _new_encoder(self, position: str) -> tokenizers.Tokenizer:
        if not self._is_byte_level:
            definition = json.loads(self.to_json())
            placed = sentence_pieces.at(definition, position)
            if position != "start" and placed == definition:
                return self._encoder("start")
            encoder = parse(json.dumps(sentence_pieces.without_controls(placed, self.controls)))
            encoder.encode_special_tokens = True
            return encoder
        added = self.added_tokens().items()
        unmarked = [n for n, token in added if n in self.controls and not token.special]
        if not unmarked:
            return self._backend
        encoder = parse(self.to_json())
        encoder.encode_special_tokens = True
        encoder.add_special_tokens([tokenizers.AddedToken(n, normalized=False) for n in unmarked])
        return encoder

    @functools.cached_property
    def _encode_fast(self) -> fast_encoding.Encode | None:
        if not self._is_byte_level:
            return None
        added = self._backend.get_added_tokens_decoder()
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        token_bytes = {
            token: bytes(byte_of[character] for character in token)
            for token, i in self._vocabulary.items()
            if i not in added and byte_of.keys() >= set(token)
        }
        splits = (SPLIT_PATTERN, *fast_encoding.PUBLISHED_SPLITS)
        definition = json.loads(self._encoder("start").to_str(pretty=False))
        return fast_encoding.encoder(definition, token_bytes, splits, self._threads)

    def decode(self, ids: Sequence[int], *, is_continued: bool = False) -> str:
        """Returns the text of token ids, special tokens by name, invalid UTF-8 as U+FFFD.

        Args:
          is_continued: the ids follow other ids, so that a blank before them belongs to the text.
        """
        ids = list(ids)
        if not is_continued or self._is_byte_level:
            return self._backend.decode(ids, skip_special_tokens=False)
        text = self._backend.decode([self.bos_id, *ids], skip_special_tokens=False)
        return text.removeprefix(self.decode([self.bos_id]))

    def decode_settled(self, ids: Sequence[int], *, is_continued: bool = False) -> tuple[str, bool]:
        """Returns the text that later ids cannot change, and True if it is the text of all ids."""
        if not self._is_byte_level:
            names = (self._backend.id_to_token(i) for i in reversed(ids))
            last = next((name for name in names if name is not None), None)
            # Consecutive byte tokens decode together: a wrong one turns all of them into U+FFFD.
            if last is None or (self._has_byte_tokens and sentence_pieces.BYTE.fullmatch(last)):
                return "", False
            return self.decode(ids, is_continued=is_continued), True
        text = self.decode(ids)
        whole = text.removesuffix("\ufffd")  # bytes of a character that later ones may complete
        return whole, whole == text

    def token_bytes(self) -> np.ndarray:
        """Returns int32 [V], raw byte counts of tokens; 0 for special tokens and unused ids."""
        if not self._is_byte_level:
            return self._decoded_bytes[0].copy()
        added = self._backend.get_added_tokens_decoder()
        bytes_V = np.zeros(self.vocab_size, np.int32)
        for token, i in self._vocabulary.items():
            if i not in added:
                bytes_V[i] = len(token)  # byte-level: one character per byte
            elif token not in self._specials:
                bytes_V[i] = len(token.encode())
        return bytes_V

    def dropped_bytes(self) -> np.ndarray | None:
        """Returns int32 [V], number of bytes that a token loses at the start of a text.

        None if no token loses any.
        """
        if self._is_byte_level or not self._decoded_bytes[1].any():
            return None
        return self._decoded_bytes[1].copy()

    @functools.cached_property
    def _decoded_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of bytes of each token inside a text, and how many it loses at the start."""
        bytes_2V = np.zeros((2, self.vocab_size), np.int32)
        ordinary = [(t, i) for t, i in self._vocabulary.items() if t not in self._specials]
        opened = [([i], [self.bos_id, i]) for _, i in ordinary]
        first, inside = (
            self._backend.decode_batch([ids[k] for ids in opened], skip_special_tokens=False)
            for k in range(2)
        )
        opening = self.decode([self.bos_id])
        for (token, i), alone, after in zip(ordinary, first, inside, strict=True):
            size = len(after.removeprefix(opening).encode())
            bytes_2V[:, i] = size, size - len(alone.encode())
            if self._has_byte_tokens and sentence_pieces.BYTE.fullmatch(token):
                bytes_2V[:, i] = 1, 0
        return bytes_2V[0], bytes_2V[1]

    def added_tokens(self) -> dict[str, tokenizers.AddedToken]:
        """Returns the added tokens with their flags, by text."""
        added = self._backend.get_added_tokens_decoder().values()
        return {token.content: token for token in added}

    def vocabulary(self) -> Mapping[str, int]:
        """Returns the id of every token, unordered."""
        return self._vocabulary

    def to_json(self) -> str:
        """Returns the tokenizer as `tokenizer.json` of the `tokenizers` library."""
        return self._backend.to_str(pretty=False)

    def save(self, path: epath.PathLike) -> None:
        """Writes a `tokenizer.json`."""
        epath.Path(path).write_text(self.to_json())


def train(
    texts: Iterable[str], vocab_size: int, special_tokens: tuple[str, ...] = (BOS,)
) -> Tokenizer:
    """Trains a byte-level BPE of exactly `vocab_size` tokens; deterministic.

    Special tokens have the first ids, then come the 256 bytes, then the merges.

    Raises:
      ValueError: the texts have too few distinct words for the vocabulary.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    try:
        with panics_as_errors():
            backend.train_from_iterator(texts, trainer)
    except RuntimeError as error:
        raise DataError(
            f"a text cannot be split into words ({first_line(error)}); a very long run of blanks "
            "may be the cause"
        ) from error
    reached = backend.get_vocab_size()
    if reached != vocab_size:
        raise DataError(
            f"config.data.vocab_size = {vocab_size}: must be at most {reached} for this training "
            "split, in which no more pairs of tokens occur twice; lower it, or give more text"
        )
    return Tokenizer(backend, "the trained tokenizer")


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer of 257 tokens: id b is byte b, id 256 is `<|bos|>`."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    # Without merges, splitting into words does not change tokens; it keeps the library's queues
    # short.
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=True
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([BOS])
    return Tokenizer(backend, "the byte tokenizer")


def parse(text: str) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer of a `tokenizer.json`; raises a DataError if invalid."""
    try:
        with panics_as_errors():
            return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"tokenizer.json cannot be read ({first_line(error)})") from error


def from_json(text: str, name: str, threads: int = 0) -> Tokenizer:
    """Returns the tokenizer of a `tokenizer.json`; for the arguments see `Tokenizer`."""
    return Tokenizer(parse(text), name, threads)


def load(path: epath.PathLike, key: str = "tokenizer") -> Tokenizer:
    """Loads a `tokenizer.json`: one saved here, or a published one.

    Args:
      key: config key that names the file, for messages.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is no `tokenizer.json`, or one that `Tokenizer` cannot use.
    """
    path = epath.Path(path).expanduser()
    if not path.exists():
        raise MissingDataError(f"{key} = {os.fspath(path)!r}: there is no such file")
    try:
        backend = parse(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{key} = {os.fspath(path)!r}: is not a tokenizer.json: {error}") from error
    return Tokenizer(backend, os.fspath(path))
