"""A corpus of many parts: the same bytes however it was prepared, killed or not."""

import dataclasses
import itertools
import json
import pathlib
import resource
import signal
import types

import pytest

from kvjax.data import (
    config as config_lib,
    loader,
    manifest,
    partial_dataset,
    parts,
    pool,
    preparation,
    prepare,
    source_kinds,
    sources,
    tokenized_part,
    tokenizer,
    vocabulary,
)
from kvjax.foundation import progress
from kvjax.foundation.errors import DataError, UserError
from tests.data.corpora import begin_preparation, files, num_parts, recording


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_rows_are_of_integers_that_hold_every_id(size, dtype):
    tokenizer = types.SimpleNamespace(vocab_size=size)
    assert tokenized_part.dtype_of(tokenizer) == dtype


def test_rows_of_a_part_are_its_documents_and_no_document_is_in_both_splits(config, small_texts):
    dataset = loader.open_dataset(prepare.prepare(config, workers=1))
    T, bos = config.sequence_length, dataset.tokenizer.bos_id
    texts = [f"{i} {text}" for i in range(3) for text in small_texts[i::3]]
    for split in manifest.SPLITS:
        split_texts, streams = [], _streams(dataset, split)
        for part, stream in zip(_parts(config), streams, strict=True):
            part_texts = [p.text for s, p in parts.split_pieces(config, part) if s == split]
            split_texts += part_texts
            tokens = [t for text in part_texts for t in (bos, *dataset.tokenizer.encode(text))]
            if split == "validation" and tokens:
                tokens += [bos] * (len(stream) - len(tokens))
            assert stream == tokens[: len(stream)] and len(tokens) - len(stream) <= T
        held_out = split == "validation"
        fraction = config.validation_fraction
        assert sorted(split_texts) == sorted(
            text for text in texts if source_kinds.is_held_out(text, fraction) == held_out
        )


def _parts(config):
    return parts.parts(config, sources.fingerprints(config))


def _streams(dataset, split):
    """Yields the tokens of each part's rows as one stream."""
    folder = pathlib.Path(dataset.path) / manifest.ROWS / manifest.ROWS_VERSION
    info = json.loads((folder / "dataset_info.json").read_text())
    lengths = next(s["shardLengths"] for s in info["splits"] if s["name"] == split)
    rows = iter(dataset.rows(split))
    for length in map(int, lengths):
        tokens = [row["tokens"].tolist() for row in itertools.islice(rows, length)]
        yield [t for i, row in enumerate(tokens) for t in row[i > 0 :]]


def test_what_is_done_stays_and_what_is_half_written_is_not_read(config, expected, monkeypatch):
    _stop_after(monkeypatch, config, 9)
    (folder,) = config.root.glob("datasets/.under-way-*")
    assert not list(config.root.glob("datasets/[!.]*"))
    rows = folder / "packed_rows/1.0.0"
    shards = sorted(rows.glob("*train*"))
    shards[3].write_bytes(shards[3].read_bytes()[:-5])
    (folder / "done" / "00005.json").write_text("{")
    abandoned = folder / f"work-{partial_dataset._machine()}-999999999-x"
    abandoned.mkdir()
    (abandoned / shards[8].name).write_bytes(b"half")
    made_parts = []
    monkeypatch.setattr(pool, "make_part", recording(made_parts))
    path = prepare.prepare(config, workers=1)
    assert made_parts == [3, 5, *range(9, num_parts(config))]
    assert files(path) == expected


def _stop_after(monkeypatch, config, count):
    """Ends a preparation after `count` parts."""
    make_part, made_parts = pool.make_part, []

    def fails(*args, **kwargs):
        if len(made_parts) == count:
            raise DataError("enough")
        made_parts.append(make_part(*args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(pool, "make_part", fails)
        with pytest.raises(DataError, match="enough"):
            prepare.prepare(config, workers=1)


def test_a_source_that_changed_between_attempts_begins_anew(config, expected, monkeypatch):
    """The earlier attempt resumes once the source is restored."""
    _stop_after(monkeypatch, config, 4)
    (folder,) = config.root.glob("datasets/.under-way-*")
    done = files(folder / "done")
    path = pathlib.Path(config.source) / "1.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"text": "one more"}\n')
    assert files(prepare.prepare(config, workers=1)) != expected
    assert files(folder / "done") == done
    path.write_bytes(before)
    made_parts = []
    monkeypatch.setattr(pool, "make_part", recording(made_parts))
    assert files(prepare.prepare(config, workers=1)) == expected
    assert made_parts == list(range(4, num_parts(config)))


@pytest.mark.slow
def test_what_was_made_of_a_source_that_changed_is_made_again(config, expected, monkeypatch):
    """The restored file is read again, since a part may hold the other text."""
    job = begin_preparation(config)
    path = pathlib.Path(config.source) / "1.jsonl"
    before, after = path.read_bytes(), path.read_bytes().replace(b"o", b"i")
    path.write_bytes(after)
    with pytest.raises(DataError, match=r"1\.jsonl changed while it was prepared"):
        job.make(workers=1, shown=False)
    monkeypatch.setattr(sources, "_check_unchanged", lambda *_: None)  # as if stamps were equal
    job.make(workers=1, shown=False)
    with pytest.raises(DataError, match=r"1\.jsonl"):
        job.finish()
    path.write_bytes(before)
    assert files(prepare.prepare(config, workers=1)) == expected


def test_a_part_that_nobody_made_is_told(config):
    job = begin_preparation(config)
    with pytest.raises(DataError, match=r"\d+ of \d+ parts are missing \(the first is 0\)"):
        job.finish()


def test_a_bucket_s_listing_is_not_remembered(config, bucket, monkeypatch):
    """Files written by workers are visible although the launcher listed the folder before."""
    remote = dataclasses.replace(config, directory="gs://out/data")
    _stop_after(monkeypatch, remote, 6)
    paths = []
    monkeypatch.setattr(partial_dataset, "forget_listings", lambda path: paths.append(str(path)))
    job = begin_preparation(remote)
    job.partial.missing()
    assert paths and all(path.endswith("/done") for path in paths)


def test_a_prepared_corpus_is_found_without_opening_its_sources(config, monkeypatch):
    path = prepare.prepare(config, workers=1)
    monkeypatch.setattr(sources, "check", lambda *_: pytest.fail("opened"))
    assert prepare.prepare(config) == path


# Name of the folder by case; it must not change, or data prepared earlier would not be found.
NAMES = {
    "bpe": "a53da88f3c165e780fca",
    "bytes": "54a067803b505c4975ca",
    "more of it": "f3a883c925a625d89a83",
    "held out": "3e4db5a4a292860833e4",
    "a file": "46e2bb378254f037267a",
    "chat": "b341c47d7ac6ce543972",
    "broken": "78983ac6e01cd32fd503",
    "parts": "4d4f3ab0ff8d92d86a74",
}


def test_what_was_prepared_once_keeps_its_name(tmp_path, monkeypatch):
    lines = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(40))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb\nc\n" * 40)
    common = dict(source=f"{tmp_path}/a.jsonl", directory=str(tmp_path / "out"))
    common["validation_fraction"] = 0.2
    cases = {
        "bpe": {},
        "bytes": dict(tokenizer="byte"),
        "more of it": dict(sequence_length=32, vocab_size=400),
        "held out": dict(validation_fraction=0.25),
        "a file": dict(validation_source=f"{tmp_path}/b.txt"),
        "chat": dict(specials="chat"),
    }

    def folder_name(skip_broken=False, **keys):
        return preparation.inspect_sources(
            config_lib.DataConfig(**common | keys), skip_broken=skip_broken, shown=False
        ).path.name

    names = {name: folder_name(**keys) for name, keys in cases.items()}
    names["broken"] = folder_name(skip_broken=True)
    monkeypatch.setattr(parts, "PART_BYTES", 100)
    monkeypatch.setattr(parts, "_ROWS", 1)
    names["parts"] = folder_name(sequence_length=16)
    assert names == NAMES


def test_a_source_that_changes_meanwhile_is_refused(config):
    """Parts of the changed files are made again."""
    job = begin_preparation(config)
    job.make(workers=1, share=(0, 4), shown=False)
    all_parts = set(range(len(job.corpus.parts)))
    made_parts = {i for i in all_parts if i % 4 == 0}
    folder = pathlib.Path(config.source)
    for changed, so_far in (("2", "2"), ("10", "012"), ("43", "012")):
        for name in changed:
            (folder / f"{name}.jsonl").write_text('{"text": "something else"}\n')
        with pytest.raises(DataError) as raised:
            job.finish()
        assert str(raised.value) == (
            f"config.data.source = {config.source!r}: changed since its preparation began "
            f"({folder}/{so_far[0]}.jsonl), and some parts are finished. Restore the sources, or "
            f"remove {job.partial.folder} to start over"
        )
        changed_parts = {
            part.index
            for part in job.corpus.parts
            if any(pathlib.Path(piece.name).stem in so_far for piece in part.slices)
        }
        assert job.partial.missing() == sorted(all_parts - (made_parts - changed_parts))
    assert not list(config.root.glob("datasets/[!.]*"))


def test_other_code_does_not_go_on(config, monkeypatch):
    _stop_after(monkeypatch, config, 4)
    monkeypatch.setattr(preparation, "code", lambda: "other")
    with pytest.raises(DataError, match="was begun with another code. Resume it"):
        prepare.prepare(config, workers=1)


@pytest.mark.slow
def test_a_bucket_gets_shards_as_they_are_made_and_the_manifest_last(
    config, expected, bucket, monkeypatch, tmp_path
):
    remote = dataclasses.replace(config, directory="gs://out/data")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _stop_after(monkeypatch, remote, 6)
    (folder,) = (bucket / "out/data/datasets").iterdir()
    assert len(list((folder / "packed_rows/1.0.0").glob("*train*"))) == 6
    assert not (folder / manifest.MANIFEST).exists() and not list(tmp_path.glob("kvjax-*"))
    count = num_parts(config)
    made_parts = []
    monkeypatch.setattr(pool, "make_part", recording(made_parts))
    path = prepare.prepare(remote, workers=1)
    assert made_parts == list(range(6, count))
    content = files(folder)
    last = max(folder.rglob("*"), key=lambda path: path.stat().st_mtime_ns * path.is_file())
    assert last.name == manifest.MANIFEST and str(path).endswith(folder.name)
    assert content.keys() == expected.keys()
    assert {n: c for n, c in content.items() if "array_record" in n} == {
        n: c for n, c in expected.items() if "array_record" in n
    }


def test_a_target_without_room_is_told_when_it_happens(config):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match="prepared data cannot be written to .*free space"):
            prepare.prepare(config, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    prepare.prepare(config, workers=1)


def test_a_tokenizer_learns_from_a_sample_of_all_parts(config, monkeypatch):
    corpus, sampled = preparation.inspect_sources(config, shown=False), []
    monkeypatch.setattr(vocabulary, "TOKENIZER_CHARACTERS", 100 * len(corpus.parts))
    monkeypatch.setattr(tokenizer, "train", lambda texts, *_: sampled.extend(texts))
    with pytest.raises(AttributeError):  # what it returns is no tokenizer
        preparation.begin(corpus, shown=False)
    assert {text.split()[0] for text in sampled} == {"0", "1", "2"}  # the files
    assert len(corpus.parts) <= len(sampled) <= 2 * len(corpus.parts)
    assert not {t for t in sampled if source_kinds.is_held_out(t, config.validation_fraction)}


def test_progress_is_what_is_done_its_rate_and_what_is_left(monkeypatch):
    clock = iter((100.0, 104.0, 104.0))
    monkeypatch.setattr(preparation, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    progress_text = preparation._ProgressText(10**9, 8 * 10**8)
    lines = [progress_text.text(types.SimpleNamespace(bytes=size)) for size in (10**8, 7 * 10**8)]
    assert lines == [
        f"tokenizing {progress.bar(0.3)}, 300.0 MB of 1.00 GB, 25.0 MB/s, "
        f"{progress.duration(28)} left",
        f"tokenizing {progress.bar(1)}, 1.00 GB of 1.00 GB, 200.0 MB/s, "
        f"{progress.duration(0)} left",
    ]
