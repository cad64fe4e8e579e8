"""The tokenizer of a data set: loaded, or trained once on a sample of all parts."""

from collections.abc import Iterator, Sequence
import itertools
import json
import pathlib

from etils import epath

from kvjax.data import (
    config as config_lib,
    folders,
    manifest,
    parts as parts_lib,
    readers,
    tokenizer as tokenizer_lib,
)
from kvjax.data.manifest import FORMAT_VERSION, TOKENIZER, digest_of
from kvjax.data.parts import Part
from kvjax.foundation import json_text, progress
from kvjax.foundation.errors import DataError, first_line

# Characters of text that a tokenizer is trained on; more hardly change the merges (nanochat: 2e9).
TOKENIZER_CHARACTERS = 2_000_000_000


def key(config: config_lib.DataConfig, source: str, num_parts: int) -> str:
    """Returns a hash of everything that determines the tokenizer of a config.

    Args:
      source: fingerprint of the sources.
      num_parts: number of parts of the corpus.
    """
    if config.tokenizer != "bpe":
        plain = config.tokenizer == "byte" and config.specials == "bos"
        return "byte" if plain else digest_of(load(config).to_json())
    # With several parts, the training text is a sample of each.
    sampled = () if num_parts == 1 else (parts_lib.part_bytes(config),)
    split, names = tokenizer_lib.SPLIT_PATTERN, tokenizer_lib.SPECIALS[config.specials]
    return digest_of(FORMAT_VERSION, source, config.vocab_size, split, *names, *sampled)


def load(config: config_lib.DataConfig) -> tokenizer_lib.Tokenizer:
    """Returns the tokenizer of a config that needs no training: of bytes, or from a file."""
    loaded = (
        tokenizer_lib.byte_tokenizer()
        if config.tokenizer == "byte"
        else tokenizer_lib.load(config.tokenizer, "config.data.tokenizer")
    )
    if config.specials == "bos":
        return loaded
    return loaded.with_specials(tokenizer_lib.SPECIALS[config.specials])


def tokenizer(
    config: config_lib.DataConfig,
    key: str,
    parts: Sequence[Part],
    on_error: readers.OnError,
    *,
    shown: bool,
) -> tokenizer_lib.Tokenizer:
    """Returns the tokenizer of a config; trains it if it has not been trained on this text before.

    Args:
      key: result of `key`.
      on_error: see `readers.OnError`.
      shown: print progress to stderr if it takes seconds.
    """
    if config.tokenizer != "bpe":
        return load(config)
    path = config.root / "tokenizers" / key
    if not is_trained(config, key):
        with (
            folders.published(path / TOKENIZER, shown) as staging,
            progress.waiting("reading for the tokenizer", shown=shown) as doing,
        ):
            texts = _training_texts(config, parts, on_error, doing)
            if (first := next(texts, None)) is None:
                raise DataError(
                    f"config.data.source = {config.source!r}: has no training text: no readable "
                    f"record has text (config.data.text_key = {config.text_key!r})"
                )
            texts = itertools.chain([first], texts)
            names = tokenizer_lib.SPECIALS[config.specials]
            trained = tokenizer_lib.train(texts, config.vocab_size, names)
            trained.save(staging / TOKENIZER)
            digests = manifest.digests(pathlib.Path(staging))
            (staging / manifest.DIGESTS).write_text(json.dumps(digests))
    return _load(path)


def is_trained(config: config_lib.DataConfig, key: str) -> bool:
    """Returns True if a trained tokenizer exists and is undamaged."""
    return folders.is_whole(config.root / "tokenizers" / key / TOKENIZER, _load)


def _load(folder: epath.Path) -> tokenizer_lib.Tokenizer:
    """Loads a stored tokenizer; raises a DamagedDataError if it is damaged."""
    try:
        if (folder / manifest.DIGESTS).exists():
            files = json_text.parse((folder / manifest.DIGESTS).read_bytes())
            manifest.check_digests(folder, files)
        return tokenizer_lib.load(folder / TOKENIZER)
    except manifest.DamagedDataError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise manifest.DamagedDataError(folder, first_line(error)) from error


def _training_texts(
    config: config_lib.DataConfig,
    parts: Sequence[Part],
    on_error: readers.OnError,
    doing: progress.waiting,
) -> Iterator[str]:
    """Yields training text from the start of every part, about equally many characters of each."""
    characters = 0
    limit = TOKENIZER_CHARACTERS // len(parts)
    for part in parts:
        start = characters
        for split, piece in parts_lib.split_pieces(config, part, on_error):
            if split != "train":
                continue
            yield piece.text
            characters += len(piece.text)
            doing.now(f"reading for the tokenizer, {progress.size(characters)}")
            if characters - start >= limit:
                break
    doing.now(f"training {config.vocab_size:,} tokens on {progress.size(characters)}")
