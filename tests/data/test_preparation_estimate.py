"""Estimates of a preparation's time and disk space, and their limits."""

import dataclasses
import os

from etils import epath
import pytest

from kvjax.data import (
    parts,
    preparation,
    preparation_estimate,
    prepare,
    tokenizer,
)
from kvjax.foundation.errors import UserError


def test_time_by_the_plan():
    cost = preparation_estimate.Estimate(
        parts=10,
        source_bytes=0,
        text_bytes=1e9,
        tokens=2e8,
        row_bytes=0,
        vocab_size=400,
        reading=1e-8,
        encoding=6e-8,
        writing=3e-8,
        training=1e-8,
    )
    assert cost.rate == pytest.approx(1e7)
    assert cost.seconds(1) == pytest.approx(10 + 100)
    assert cost.seconds(5) == pytest.approx(10 + 20)
    assert cost.seconds(7) == pytest.approx(10 + 20)  # two rounds for some
    assert cost.seconds(1000) == pytest.approx(10 + 10)


class _Clock:
    """A clock that advances a second per reading."""

    def __init__(self):
        self._now = 0

    def perf_counter(self):
        self._now += 1
        return self._now


def test_a_plan_of_a_corpus_that_is_read_whole(small_config, small_texts, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation_estimate, "time", _Clock())
    corpus = preparation.inspect_sources(
        dataclasses.replace(small_config, directory=str(tmp_path / "out")), shown=False
    )
    cost = preparation_estimate.estimate(corpus, workers=2)
    text_bytes = sum(len(text.encode()) for text in small_texts)
    trained = tokenizer.train(small_texts, 400)
    tokens = sum(1 + len(trained.encode(text)) for text in small_texts)
    assert cost == preparation_estimate.Estimate(
        parts=1,
        source_bytes=os.path.getsize(small_config.source),
        text_bytes=pytest.approx(text_bytes),
        tokens=pytest.approx(tokens),
        row_bytes=pytest.approx(5 << 16),  # three blocks of rows, and the padding of two files
        vocab_size=400,
        reading=1 / text_bytes,
        encoding=1 / text_bytes,
        writing=pytest.approx(1.1 / text_bytes),  # a tenth is compressed by xz
        training=1 / text_bytes,
    )


def test_what_a_large_corpus_takes_is_told_before(config, monkeypatch, bucket):
    corpus = preparation.inspect_sources(config, shown=False)
    seconds = dict(reading=2**-22, encoding=2**-21, writing=2**-22)  # 2**-20 a byte
    sizes = dict(source_bytes=1, text_bytes=7200.0 * 2**20, row_bytes=3e9, tokens=2.5e9)
    cost = preparation_estimate.Estimate(
        parts=len(corpus.parts), vocab_size=400, **sizes, **seconds
    )
    monkeypatch.setattr(preparation_estimate, "estimate", lambda corpus, workers: cost)
    free = {"free": 3e9}
    monkeypatch.setattr(preparation_estimate, "_free", lambda folder: free["free"])

    def check(hours, corpus=corpus):
        return preparation_estimate.check(corpus, 1, hours, shown=False)

    check(2.0)
    check(None)
    folder, named = str(corpus.path.parent), f"config.data.source = {config.source!r}"
    with pytest.raises(UserError) as raised:
        check(1.99)
    assert str(raised.value) == (
        f"preparing {named} takes about 2.0 h here, with 1 processes: 2.5B tokens from 7.55 GB of "
        "text. Prepare it beforehand, on more cores or a cluster: "
        f"`{config.command()}` (--plan prints details), or raise the limit here: --prepare_hours=3"
    )
    with pytest.raises(UserError, match="takes about 2.0 h here"):
        prepare.prepare(config, workers=1, hours=1.0)
    assert not list(config.root.glob("datasets/.under-way-*"))
    free["free"] = 3e9 - 1
    with pytest.raises(UserError) as raised:
        check(None)
    assert str(raised.value) == (
        f"{folder} has 3.00 GB free, and preparing {named} needs about 3.00 GB there: free some "
        "space, or set config.data.directory (or $KVJAX_CACHE) to another disk"
    )
    job = preparation.begin(corpus, shown=False)
    job.make(workers=1, share=(1, 2), shown=False)  # every second part
    check(1.0)
    with pytest.raises(UserError, match="takes about 60 min here"):
        check(0.99)
    assert preparation_estimate.room(corpus, cost, 3) == [(folder, 1.5e9, 3e9 - 1)]
    monkeypatch.setattr(preparation_estimate.tempfile, "gettempdir", lambda: "/temporary")
    remote = dataclasses.replace(corpus, path=epath.Path("gs://out/data/x"))
    part_bytes = 3e9 / len(corpus.parts)
    assert preparation_estimate.room(remote, cost, 3) == [
        ("gs://out/data", 3e9, float("inf")),
        ("/temporary", 3 * part_bytes, 3e9 - 1),
    ]


def test_of_many_parts_some_are_sampled_from_their_start(config, monkeypatch, tmp_path):
    """Trains a smaller vocabulary where the sample is too short for the config's."""
    monkeypatch.setattr(preparation_estimate, "SAMPLED_CHARACTERS", 300)
    (tmp_path / "validation.txt").write_text("one\ftwo\f" * 999)
    config = dataclasses.replace(
        config, validation_source=str(tmp_path / "validation.txt"), vocab_size=30_000
    )
    corpus, sampled = preparation.inspect_sources(config, shown=False), []
    split_pieces = parts.split_pieces

    def noted(config, part, broken):
        sampled.append([part.index, 0])
        for split, piece in split_pieces(config, part, broken):
            yield split, piece
            sampled[-1][1] += len(piece.text)
            assert sampled[-1][1] < 300

    monkeypatch.setattr(parts, "split_pieces", noted)
    cost = preparation_estimate.estimate(corpus, workers=1)
    count = len(corpus.parts)
    step = count // 8
    assert [index for index, _ in sampled] == [*range(step // 2, count, step)][:8]
    assert cost.parts == count and cost.vocab_size == 512
    size = (tmp_path / "validation.txt").stat().st_size
    assert preparation_estimate._held_out(corpus) == size / corpus.bytes
