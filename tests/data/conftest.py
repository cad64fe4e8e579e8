"""A small corpus of made-up words, and a data set prepared from it once."""

import dataclasses
import random
import shutil

import numpy as np
import pytest

from kvjax.data import config as config_lib, loader, manifest, packed_rows, parts, prepare
from tests.data import corpora
from tests.data.corpora import ROWS, SHARDS, T

SEQUENCE_LENGTH = 16


@pytest.fixture(scope="session")
def small_texts():
    """200 texts of up to 40 words out of 300, many not ASCII."""
    rng = random.Random(0)
    letters = "etaoinshrdluéß—中🙂"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 40))) + "\n" for _ in range(200)]


@pytest.fixture(scope="session")
def small_config(tmp_path_factory, small_texts):
    folder = tmp_path_factory.mktemp("small")
    return config_lib.DataConfig(
        source=str(corpora.write_jsonl(folder / "small.jsonl", small_texts)),
        validation_fraction=0.1,
        vocab_size=400,
        sequence_length=SEQUENCE_LENGTH,
        directory=str(folder / "prepared"),
    )


@pytest.fixture(scope="session")
def small_dataset(small_config):
    return loader.open_dataset(prepare.prepare(small_config))


@pytest.fixture
def config(small_config, small_texts, tmp_path, monkeypatch):
    """A config of 48 parts of three files, in a cache of their own."""
    monkeypatch.setattr(parts, "PART_BYTES", corpora.PART)
    monkeypatch.setattr(parts, "_ROWS", 1)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(3):
        corpora.write_jsonl(folder / f"{i}.jsonl", [f"{i} {text}" for text in small_texts[i::3]])
    return dataclasses.replace(small_config, source=str(folder), directory="")


@pytest.fixture
def expected(config, tmp_path, monkeypatch):
    """The bytes of each file that a single process prepares from `config`."""
    with monkeypatch.context() as patch:
        patch.setenv("KVJAX_CACHE", str(tmp_path / "expected"))
        content = corpora.files(prepare.prepare(config, workers=1))
    assert corpora.num_parts(config) > 9 and len(content) > 12
    return content


@pytest.fixture(scope="session")
def written(tmp_path_factory, small_dataset):
    """A data set of 40 shards, 0 to 12 rows in each, and its training rows as an array."""
    path = tmp_path_factory.mktemp("many") / "many"
    folder = path / ROWS
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 13, SHARDS)
    counts[[0, 7, 8, SHARDS - 1]] = 0
    written_shards, expected = dict(train=[], validation=[]), []
    for i, count in enumerate(counts):
        tokens = rng.integers(1 << 16, size=count * T + 1).astype("<u2")
        for split in written_shards:
            shard = packed_rows.shard_name(split, i, SHARDS)
            writer = packed_rows.ShardWriter(folder / shard, T, tokens.dtype)
            writer.add(tokens)
            written_shards[split].append(writer.close(fill=None))
            assert (folder / shard).exists() == (count > 0)
        expected += [tokens[k * T : k * T + T + 1] for k in range(count)]
    packed_rows.describe(folder, written_shards, T + 1, np.dtype("<u2"))
    shutil.copy(small_dataset.path / manifest.TOKENIZER, path)
    rows = {split: {"rows": int(counts.sum())} for split in written_shards}
    config = small_dataset.info["config"] | dict(sequence_length=T)
    info = small_dataset.info | dict(config=config, splits=rows)
    manifest.write(path, info, manifest.digests(path))
    return path, np.array(expected)


@pytest.fixture
def dataset(written):
    return loader.open_dataset(written[0])
