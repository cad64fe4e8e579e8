"""Turns text into packed rows, once: `python -m kvjax.data.prepare --source=... --vocab_size=...`.

The stream of a split is [BOS] + document, concatenated. Row i holds tokens [i·T, i·T + T] of it, so
that every token after the first is a target exactly once. Train drops what doesn't fill its last
row; validation fills it with BOS, which counts no bytes. The folder of a data set is named by a
hash of all that decides its content, and appears whole or not at all.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import io
import json
import lzma
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any
import uuid

from absl import logging
from etils import epath
import numpy as np

from kvjax.data import config as config_lib
from kvjax.data import manifest
from kvjax.data import readers
from kvjax.data import sources
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.data.manifest import FORMAT_VERSION
from kvjax.data.manifest import MANIFEST
from kvjax.data.manifest import TOKENIZER
from kvjax.foundation import command_line
from kvjax.foundation import json_text
from kvjax.foundation import progress
from kvjax.foundation import runtime
from kvjax.foundation.config_keys import keys
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import UserError
from kvjax.foundation.errors import first_line
from kvjax.foundation.errors import warn
from kvjax.foundation.files import unused

# The library's encodings take about 100 bytes a token, so this much text is encoded at a time.
BATCH_CHARACTERS = 1 << 21
# Merges learned from more text than this hardly differ (nanochat: 2e9).
TOKENIZER_CHARACTERS = 2_000_000_000
STAGING = ".staging-kvjax-"
# A staging folder in which nothing was written for so long is what a killed preparation left.
ABANDONED_SECONDS = 24 * 3600


def prepare(config: config_lib.DataConfig, *, shown: bool = True) -> epath.Path:
    """The folder of the data set that `config` asks for, written if it isn't there yet.

    It holds `dataset.json` (what is in it), `tokenizer.json` and `packed_rows/` (TFDS,
    ArrayRecord). A preparation that is killed leaves nothing under this name, and several at once
    write the same thing. With a bucket (gs://) as directory, rows are made in the local temporary
    folder and copied, `dataset.json` last.

    Args:
      shown: say on standard error how far it is, where it takes seconds.

    Raises:
      FileNotFoundError: a source or tokenizer that isn't there.
      ValueError: what can't be read, an empty split, too little text for the vocabulary or for one
        row; with the file, the value and what to do.
    """
    if config.source.startswith(config_lib.PREPARED):
        return runtime.path("config.data.source", config.source.removeprefix(config_lib.PREPARED))
    runtime.quiet_libraries()
    with progress.waiting("looking at the sources", shown=shown) as doing:
        source = sources.fingerprint(config, doing.now)
    tokenizer_key = _tokenizer_key(config, source)
    key = _hash(FORMAT_VERSION, source, tokenizer_key, config.sequence_length)
    path = config.root / "datasets" / key
    if _is_whole(path / MANIFEST, manifest.read):
        return path
    with progress.waiting("opening the sources", shown=shown):
        sources.check(config)
        for split in sources.SPLITS:  # An empty one is told before a tokenizer is trained.
            next(sources.pieces(config, split))
    tokenizer = _tokenizer(config, tokenizer_key, shown)
    with _published(path / MANIFEST, shown) as staging:
        _write(config, tokenizer, staging, shown)
    return path


def _write(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    staging: epath.Path,
    shown: bool,
) -> None:
    from kvjax.data import packed_rows  # TFDS takes 0.5 s, and a data set that is there needs none.

    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    splits, streams = {}, {}
    with tempfile.TemporaryDirectory(prefix="tokens-", dir=staging) as folder:
        for split in sources.SPLITS:
            file = os.path.join(folder, split)
            splits[split] = _write_stream(config, split, tokenizer, dtype, file, shown)
            streams[split] = np.memmap(file, dtype, mode="r")
        for split, stream in streams.items():
            splits[split]["rows"] = (len(stream) - 1) // config.sequence_length
        if not splits["train"]["rows"]:
            raise DataError(
                f"config.data.sequence_length = {config.sequence_length}: "
                f"the train split has {splits['train']['tokens']} tokens, and a row needs"
                f" sequence_length + 1 = {config.sequence_length + 1}: lower sequence_length, or"
                f" give more text in source={config.source!r}."
            )
        total = sum(splits[split]["rows"] for split in splits)
        with (
            progress.waiting("writing rows", shown=shown) as doing,
            contextlib.redirect_stdout(io.StringIO()),  # TFDS announces a download: there is none.
        ):
            wrote = lambda rows: doing.now(f"writing rows, {rows:,} of {total:,}")
            builder = packed_rows.PackedRows(streams, config.sequence_length, staging, wrote)
            builder.download_and_prepare(download_dir=folder)
        del builder, streams
    tokenizer.save(staging / TOKENIZER)
    info = {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(config),
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "sha256": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        },
        "dtype": dtype.name,
        "xz_bits_per_byte": splits["validation"].pop("xz_bits_per_byte"),
        "splits": splits,
    }
    manifest.write(pathlib.Path(staging), info)


def _write_stream(
    config: config_lib.DataConfig,
    split: str,
    tokenizer: tokenizer_lib.Tokenizer,
    dtype: np.dtype,
    file: str,
    shown: bool,
) -> dict[str, int | float]:
    """The documents, bytes (UTF-8) and tokens (with BOS) of a split, written to a local file."""
    token_bytes_V = tokenizer.token_bytes()
    documents = num_bytes = num_tokens = num_token_bytes = 0
    # The figure any compressor's user knows, on the very text that bits per byte are measured on.
    xz = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME) if split == "validation" else None
    xz_bytes = 0
    what = f"tokenizing {split}"
    with open(file, "wb") as out, progress.waiting(what, shown=shown) as doing:
        for batch in _batches(sources.pieces(config, split)):
            for piece, ids in zip(
                batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True
            ):
                opening = [tokenizer.bos_id] * piece.starts_document
                tokens = np.concatenate([np.array(opening, dtype), ids.astype(dtype)])
                out.write(tokens)
                content = piece.text.encode()
                documents += piece.starts_document
                num_bytes += len(content)
                num_tokens += len(tokens)
                num_token_bytes += int(token_bytes_V[tokens].sum())
                xz_bytes += len(xz.compress(content)) if xz else 0
            doing.now(f"{what}, {documents:,} documents, {_size(num_bytes)}")
        if split == "validation":
            # Row starts are multiples of T: so the last row is whole, and nothing is left over.
            missing = -(num_tokens - 1) % config.sequence_length
            out.write(np.full(missing, tokenizer.bos_id, dtype))
    if num_token_bytes != num_bytes:
        raise DataError(
            f"config.data.tokenizer = {config.tokenizer!r}: loses text: the {split} split has "
            f"{num_bytes} bytes, its tokens {num_token_bytes}. Use a tokenizer whose vocabulary "
            "has all 256 bytes, or 'bpe'"
        )
    counts = {"documents": documents, "bytes": num_bytes, "tokens": num_tokens}
    if xz:
        counts["xz_bits_per_byte"] = 8 * (xz_bytes + len(xz.flush())) / num_bytes
    return counts


def _batches(pieces: Iterator[readers.Piece]) -> Iterator[list[readers.Piece]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenizer_key(config: config_lib.DataConfig, source: str) -> str:
    if config.tokenizer == "byte":
        return "byte"
    if config.tokenizer != "bpe":
        return _hash(tokenizer_lib.load(config.tokenizer, "config.data.tokenizer").to_json())
    return _hash(
        FORMAT_VERSION, source, config.vocab_size, tokenizer_lib.SPLIT_PATTERN, tokenizer_lib.BOS
    )


def _tokenizer(config: config_lib.DataConfig, key: str, shown: bool) -> tokenizer_lib.Tokenizer:
    """The tokenizer asked for; one trained before on the same text is read back."""
    if config.tokenizer == "byte":
        return tokenizer_lib.byte_tokenizer()
    if config.tokenizer != "bpe":
        return tokenizer_lib.load(config.tokenizer)
    path = config.root / "tokenizers" / key
    if not _is_whole(path / TOKENIZER, _load_tokenizer):
        with (
            _published(path / TOKENIZER, shown) as staging,
            progress.waiting("reading for the tokenizer", shown=shown) as doing,
        ):
            trained = tokenizer_lib.train(_training_texts(config, doing), config.vocab_size)
            trained.save(staging / TOKENIZER)
            digests = manifest.digests(pathlib.Path(staging))
            (staging / manifest.DIGESTS).write_text(json.dumps(digests))
    return _load_tokenizer(path)


def _load_tokenizer(folder: epath.Path) -> tokenizer_lib.Tokenizer:
    """The tokenizer of a folder of the cache; a DamagedDataError if it is not what was written."""
    try:
        if (folder / manifest.DIGESTS).exists():
            files = json_text.parse((folder / manifest.DIGESTS).read_bytes())
            manifest.check_digests(folder, files)
        return tokenizer_lib.load(folder / TOKENIZER)
    except manifest.DamagedDataError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise manifest.DamagedDataError(folder, first_line(error)) from error


def _training_texts(config: config_lib.DataConfig, doing: progress.waiting) -> Iterator[str]:
    characters = told = 0
    for piece in sources.pieces(config, "train"):
        yield piece.text
        characters += len(piece.text)
        if characters - told > BATCH_CHARACTERS:
            told = characters
            doing.now(f"reading for the tokenizer, {_size(characters)}")
        if characters >= TOKENIZER_CHARACTERS:
            break
    doing.now(f"learning {config.vocab_size:,} tokens from {_size(characters)}")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _is_whole(file: epath.Path, read: Callable[[epath.Path], Any]) -> bool:
    """Whether a folder is there as it was written; one that is damaged is set aside by name.

    Args:
      file: the one in it by which others know that all are there.
      read: raises a DamagedDataError if they are not.

    Raises:
      DamagedDataError: of a bucket's folder, which cannot be renamed.
    """
    folder = file.parent
    remote = "://" in os.fspath(folder)
    if not (file if remote else folder).exists():
        return False  # in a bucket a killed upload leaves a part, which the next one completes
    try:
        if not file.exists():
            raise manifest.DamagedDataError(folder, f"{file.name} is missing")
        read(folder)
        return True
    except manifest.DamagedDataError as error:
        if remote:
            raise
        aside = unused(folder.parent / f"{folder.name}.damaged")
        with contextlib.suppress(FileNotFoundError):  # another process was first
            folder.rename(aside)
            warn(
                f"{os.fspath(folder)} is damaged ({error.what}): set aside as {aside.name}, and "
                "made again"
            )
        return False


@contextlib.contextmanager
def _published(file: epath.Path, shown: bool) -> Iterator[epath.Path]:
    """A local folder to write `file` and others into; without an exception it becomes `file`'s."""
    path = file.parent
    # ArrayRecord reads buckets but doesn't write them, and they can't rename a folder.
    remote = "://" in os.fspath(path)
    parent = epath.Path(tempfile.gettempdir()) if remote else path.parent
    staging = parent / f"{STAGING}{path.name}-{uuid.uuid4().hex}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(pathlib.Path(parent))
        staging.mkdir()
    except OSError as error:
        raise UserError(
            f"prepared data cannot be written to {os.fspath(parent)}: {error.strerror or error}. "
            "Give config.data.directory, or set KVJAX_CACHE, to a folder that can be written"
        ) from error
    try:
        yield staging
        if remote:
            with progress.waiting(f"uploading to {path}", shown=shown) as doing:
                _upload(pathlib.Path(staging), path, file.name, doing)
        else:
            _rename(staging, file)
    finally:
        if staging.exists():
            staging.rmtree()


def _rename(staging: epath.Path, file: epath.Path) -> None:
    try:
        staging.rename(file.parent)
    except OSError as error:
        if not file.exists():  # Otherwise another process was first, with the same content.
            raise DataError(
                f"{os.fspath(file.parent)} lacks {file.name}: remove that folder."
            ) from error


def _upload(staging: pathlib.Path, path: epath.Path, last: str, doing: progress.waiting) -> None:
    """Copies a folder; `last` is the file by which others know that all are there."""
    for file in sorted(staging.rglob("*"), key=lambda file: file.name == last):
        if file.is_file():
            target = path / file.relative_to(staging).as_posix()
            doing.now(f"uploading {target}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())


def _remove_abandoned(folder: pathlib.Path) -> None:
    for staging in folder.glob(f"{STAGING}*"):
        try:
            newest = max(file.stat().st_mtime for file in (staging, *staging.rglob("*")))
        except FileNotFoundError:
            continue  # Its preparation ended meanwhile.
        if time.time() - newest > ABANDONED_SECONDS:
            logging.info("removing %s, left by a preparation that was killed", staging)
            shutil.rmtree(staging, ignore_errors=True)


def _hash(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=10).hexdigest()


def _options(arguments: list[str]) -> config_lib.DataConfig:
    """The data set that the options ask for: one option per key."""
    parser = command_line.Parser(__doc__)
    for key in keys(config_lib.DataConfig):
        name = config_lib.FLAG_NAMES.get(key.name, key.name)
        default = getattr(config_lib.DataConfig, key.name)
        text = f"{key.meaning} ({default!r})".replace("%", "%%")
        parser.add_argument(
            f"--{name}", dest=key.name, type=type(default), default=default, help=text
        )
    return config_lib.DataConfig(**vars(parser.parse(arguments)))


def main(arguments: list[str]) -> None:
    """Prepares the data set of the options, and prints its folder and what is in it."""
    try:
        path = prepare(_options(arguments))
    except UserError as error:
        raise UserError(config_lib.as_options(str(error))) from error
    info = {k: v for k, v in manifest.read(path).items() if k not in manifest.OF_FILES}
    print(json.dumps(info, indent=2) + "\n" + os.fspath(path))


if __name__ == "__main__":
    command_line.run(main)
