"""A corpus of many parts: the same bytes however it was prepared, killed or not."""

import collections
import concurrent.futures.process
import dataclasses
import hashlib
import json
import os
import pathlib
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import types

from etils import epath
import psutil
import pytest

from kvjax.data import (
    config as config_lib,
    loader,
    manifest,
    partial_dataset,
    parts,
    pool,
    preparation,
    preparation_estimate,
    prepare,
    source_kinds,
    sources,
    tokenized_part,
    tokenizer,
    vocabulary,
)
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import DataError, UserError
from tests.data.corpora import PART, files, noting, num_parts
from tests.job import Job

# A preparation in a process of its own, of small parts.
PREPARE = f"""
import sys
from kvjax.data import config, parts, prepare
if __name__ == "__main__":
    parts.PART_BYTES, parts._ROWS = {PART}, 1
    made = prepare.prepare(config.DataConfig(**eval(sys.argv[1])), workers=int(sys.argv[2]))
    print(made)
"""


@pytest.fixture
def config(many_parts):
    return many_parts


@pytest.fixture
def expected(config, tmp_path, monkeypatch):
    """The files that one process makes, undisturbed."""
    with monkeypatch.context() as patch:
        patch.setenv("KVJAX_CACHE", str(tmp_path / "expected"))
        path = prepare.prepare(config, workers=1)
    found = files(path)
    assert num_parts(config) >= 12 and len(found) >= 12
    return found


def start(config, workers, script) -> subprocess.Popen:
    """A script like PREPARE in a process of its own."""
    command = [sys.executable, str(script), repr(dataclasses.asdict(config)), str(workers)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(config, expected, workers):
    assert files(prepare.prepare(config, workers=workers)) == expected


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_rows_are_of_integers_that_hold_every_id(size, dtype):
    made = types.SimpleNamespace(vocab_size=size)
    assert tokenized_part.dtype_of(made) == dtype


def test_no_document_is_lost_or_twice_and_none_of_validation_in_training(config, small_texts):
    dataset = loader.open_dataset(prepare.prepare(config, workers=1))
    bos, found = dataset.tokenizer.bos_id, {}
    for split in manifest.SPLITS:
        documents = collections.Counter()
        for shard in _shards(dataset, split):
            for tokens in _documents(shard, bos):
                text = dataset.tokenizer.decode(tokens)
                documents[hashlib.blake2b(text.encode()).digest()] += 1
        found[split] = documents

    def digest(text):
        return hashlib.blake2b(text.encode()).digest()

    texts = [f"{i} {text}" for i in range(3) for text in small_texts[i::3]]
    held_out = {t for t in texts if source_kinds.is_held_out(t, config.validation_fraction)}
    assert found["validation"] == collections.Counter(map(digest, held_out))
    trained = collections.Counter(digest(t) for t in texts if t not in held_out)
    assert max(found["train"].values()) == 1
    # What does not fill a part's last row is left out: less than a row.
    T, cut = config.sequence_length, parts.parts(config, sources.fingerprints(config))
    read, streams = collections.Counter(), _shards(dataset, "train")
    for part, stream in zip(cut, streams, strict=True):
        texts = [p.text for split, p in parts.split_pieces(config, part) if split == "train"]
        read.update(map(digest, texts))
        whole = [token for text in texts for token in (bos, *dataset.tokenizer.encode(text))]
        assert stream == whole[: len(stream)] and len(whole) - len(stream) <= T
    assert read == trained and sum((found["train"] - trained).values()) <= len(cut)


def _shards(dataset, split):
    """Returns the tokens of each part's rows as one stream."""
    folder = pathlib.Path(dataset.path) / manifest.ROWS / manifest.ROWS_VERSION
    info = json.loads((folder / "dataset_info.json").read_text())
    lengths = next(s["shardLengths"] for s in info["splits"] if s["name"] == split)
    rows, first = dataset.rows(split), 0
    for length in map(int, lengths):
        stream = []
        for i in range(first, first + length):
            tokens = rows[i]["tokens"].tolist()
            stream += tokens[1:] if stream else tokens
        first += length
        yield stream


def _documents(stream, bos):
    """The token ids of each document of a stream; the last one may be cut."""
    documents = []
    for token in stream:
        if token == bos:
            documents.append([])
        else:
            documents[-1].append(token)
    return [document for document in documents if document]


@pytest.mark.slow
def test_two_training_processes_share_it(config, expected, tmp_path):
    given = json.dumps([dataclasses.asdict(config), PART])
    job = Job([["tests.job", "prepared", given]] * 2, devices=1, logs=tmp_path / "logs")
    found = [json.loads(output.splitlines()[-1]) for output in job.succeed()]
    count = num_parts(config)
    assert [f["made"] for f in found] == [list(range(0, count, 2)), list(range(1, count, 2))]
    assert found[0]["path"] == found[1]["path"] and files(found[0]["path"]) == expected


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(config, expected, tmp_path):
    """The preparation that is killed has three processes; none of them outlives it."""
    # However fast the machine, the first attempt makes four parts (and those in flight), the
    # second four more, and so on: every kill finds work to end.
    datasets, enough = tmp_path / "cache" / "datasets", tmp_path / "enough"
    held = tmp_path / "held.py"
    held.write_text(
        "import pathlib, time\nfrom kvjax.data import tokenized_part\n"
        "write = tokenized_part.write\n"
        "def hold(*args, **kwargs):\n"
        f"    while len(list(pathlib.Path({str(datasets)!r}).glob('.under-way-*/done/*')))"
        f" >= int(pathlib.Path({str(enough)!r}).read_text()):\n"
        "        time.sleep(0.05)\n"
        "    return write(*args, **kwargs)\n"
        f"tokenized_part.write = hold\n{PREPARE}"
    )

    def count():
        return len(list(datasets.glob(".under-way-*/done/*")))

    rng, done, workers = random.Random(0), [0], []
    for i in range(10):
        enough.write_text(str(4 * (i + 1)))
        process = start(config, 3, held)
        while i % 2 and count() == done[-1]:  # half of them while workers start, or work
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3 if i % 2 else 3))
        assert process.poll() is None
        workers += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        done.append(count())
        assert not list(datasets.glob("[!.]*"))
    print(f"parts done after each kill: {done} of {num_parts(config)}")
    assert done == sorted(done) and done[-1] >= 5  # nothing that was done was lost
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert workers and not alive
    assert files(prepare.prepare(config, workers=2)) == expected
    assert not list(datasets.glob(".under-way-*"))


def test_what_is_done_stays_and_what_is_half_written_is_not_read(config, expected, monkeypatch):
    _stop_after(monkeypatch, config, 9)
    (folder,) = config.root.glob("datasets/.under-way-*")
    assert not list(config.root.glob("datasets/[!.]*"))
    rows = folder / "packed_rows/1.0.0"
    shards = sorted(rows.glob("*train*"))
    shards[3].write_bytes(shards[3].read_bytes()[:-5])
    (folder / "done" / "00005.json").write_text("{")
    abandoned = folder / f"work-{partial_dataset._here()}-999999999-x"
    abandoned.mkdir()
    (abandoned / shards[8].name).write_bytes(b"half")
    made = []
    monkeypatch.setattr(pool, "make_part", noting(made))
    path = prepare.prepare(config, workers=1)
    assert made == [3, 5, *range(9, num_parts(config))]
    assert files(path) == expected


def _stop_after(monkeypatch, config, count):
    """A preparation that ends after so many parts."""
    make_part, made = pool.make_part, []

    def fails(*args, **kwargs):
        if len(made) == count:
            raise DataError("enough")
        made.append(make_part(*args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(pool, "make_part", fails)
        with pytest.raises(DataError, match="enough"):
            prepare.prepare(config, workers=1)


@pytest.mark.slow
def test_a_source_that_changed_between_attempts_begins_anew(config, expected, monkeypatch, capsys):
    """The earlier attempt resumes once the source is restored."""
    _stop_after(monkeypatch, config, 4)
    (folder,) = config.root.glob("datasets/.under-way-*")
    done = files(folder / "done")
    path = pathlib.Path(config.source) / "1.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"text": "one more"}\n')
    assert files(prepare.prepare(config, workers=1)) != expected
    said = f"{folder} holds parts of an earlier preparation, from sources that have changed since"
    assert said in capsys.readouterr().err and files(folder / "done") == done
    path.write_bytes(before)
    assert files(prepare.prepare(config, workers=1)) == expected
    assert "earlier preparation" not in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_made_of_a_source_that_changed_is_made_again(config, expected, monkeypatch):
    """Although it is as it was in the end: a part may have been made of the other text."""
    making = preparation.begin(preparation.inspect_sources(config, shown=False), shown=False)
    path = pathlib.Path(config.source) / "1.jsonl"
    before, others = path.read_bytes(), path.read_bytes().replace(b"o", b"i")
    path.write_bytes(others)
    with pytest.raises(DataError, match=r"1\.jsonl changed while it was prepared"):
        making.make(workers=1, shown=False)
    monkeypatch.setattr(sources, "_check_unchanged", lambda *_: None)  # in the same instant
    making.make(workers=1, shown=False)
    with pytest.raises(DataError, match=r"1\.jsonl"):
        making.finish()
    path.write_bytes(before)
    assert files(prepare.prepare(config, workers=1)) == expected


@pytest.mark.slow
def test_what_a_plan_is_missing_for_is_made_anew(config, expected, monkeypatch, capsys):
    _stop_after(monkeypatch, config, 4)
    (folder,) = config.root.glob("datasets/.under-way-*")
    (folder / partial_dataset.PLAN).write_text("")
    assert files(prepare.prepare(config, workers=1)) == expected
    assert "has no readable plan.json: starting over" in capsys.readouterr().err


@pytest.mark.slow
def test_the_second_of_two_leaves_nothing_behind(config, expected):
    corpus = preparation.inspect_sources(config, shown=False)
    making = preparation.begin(corpus, shown=False)
    making.make(workers=1, shown=False)
    making.finish()
    late = preparation.begin(corpus, shown=False)
    late.make(workers=1, shown=False)
    assert files(late.finish()) == expected
    assert not list(config.root.glob("datasets/.under-way-*"))


def test_a_part_that_nobody_made_is_told(config):
    making = preparation.begin(preparation.inspect_sources(config, shown=False), shown=False)
    with pytest.raises(DataError, match=r"\d+ of \d+ parts are not made \(the first is 0\)"):
        making.finish()


def test_a_bucket_s_listing_is_not_remembered(config, bucket, monkeypatch):
    """Files written by workers are visible although the launcher listed the folder before."""
    remote = dataclasses.replace(config, directory="gs://out/data")
    _stop_after(monkeypatch, remote, 6)
    asked = []
    monkeypatch.setattr(partial_dataset, "forget_listings", lambda path: asked.append(str(path)))
    making = preparation.begin(preparation.inspect_sources(remote, shown=False), shown=False)
    making.partial.missing()
    assert asked and all(path.endswith("/done") for path in asked)


def test_a_prepared_corpus_is_found_without_opening_its_sources(config, monkeypatch):
    path = prepare.prepare(config, workers=1)
    monkeypatch.setattr(sources, "check", lambda *_: pytest.fail("opened"))
    assert prepare.prepare(config) == path


# By what is asked, the name of the folder: old data are found by it.
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
    one = dict(source=f"{tmp_path}/a.jsonl", directory=str(tmp_path / "out"))
    one["validation_fraction"] = 0.2
    asked = {
        "bpe": {},
        "bytes": dict(tokenizer="byte"),
        "more of it": dict(sequence_length=32, vocab_size=400),
        "held out": dict(validation_fraction=0.25),
        "a file": dict(validation_source=f"{tmp_path}/b.txt"),
        "chat": dict(specials="chat"),
    }

    def look(skip_broken=False, **keys):
        return preparation.inspect_sources(
            config_lib.DataConfig(**one | keys), skip_broken=skip_broken, shown=False
        ).path.name

    found = {name: look(**keys) for name, keys in asked.items()}
    found["broken"] = look(skip_broken=True)
    monkeypatch.setattr(parts, "PART_BYTES", 100)
    monkeypatch.setattr(parts, "_ROWS", 1)
    found["parts"] = look(sequence_length=16)
    assert found == NAMES


def test_a_source_that_changes_meanwhile_is_refused(config):
    """Three of what changed are named, and parts of it are made again."""
    making = preparation.begin(preparation.inspect_sources(config, shown=False), shown=False)
    making.make(workers=1, share=(0, 4), shown=False)
    every = set(range(len(making.corpus.parts)))
    made = {i for i in every if i % 4 == 0}
    folder = pathlib.Path(config.source)
    for changed, more in (("2", ""), ("10", ""), ("43", " and 2 more")):
        for name in changed:
            (folder / f"{name}.jsonl").write_text('{"text": "something else"}\n')
        names = "2" if changed == "2" else "012"
        named = ", ".join(f"{folder}/{name}.jsonl" for name in names)
        with pytest.raises(DataError) as told:
            making.finish()
        assert str(told.value) == (
            f"config.data.source = {config.source!r}: changed since its preparation began "
            f"({named}{more}), and some parts are finished. Restore the sources, or "
            f"remove {making.partial.folder} to start over"
        )
        of = {
            part.index
            for part in making.corpus.parts
            for piece in part.slices
            if pathlib.Path(piece.name).stem in names
        }
        assert making.partial.missing() == sorted(every - (made - of))
    assert not list(config.root.glob("datasets/[!.]*"))


def test_other_code_does_not_go_on(config, monkeypatch):
    _stop_after(monkeypatch, config, 4)
    monkeypatch.setattr(preparation, "code", lambda: "other")
    with pytest.raises(DataError, match="begun by other code or with another plan .*now 'other'"):
        prepare.prepare(config, workers=1)


@pytest.mark.slow
def test_with_nothing_done_an_earlier_attempt_is_no_hindrance(config, monkeypatch):
    _stop_after(monkeypatch, config, 0)
    monkeypatch.setattr(preparation, "code", lambda: "other")
    prepare.prepare(config, workers=1)


class _Workers(concurrent.futures.Executor):
    """Processes' work done in this one, as they would be given it."""

    def __init__(self, count, context, *, initializer, initargs):
        self.count, self.method, self.ended = count, context.get_start_method(), None
        initializer(*pickle.loads(pickle.dumps(initargs)))

    def submit(self, function, part):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(pickle.loads(pickle.dumps(part))))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **options):
        self.ended = options


def test_what_workers_are_given(config, monkeypatch):
    """And how they end: with their caller, and when one of them fails."""
    (pathlib.Path(config.source) / "2.jsonl").unlink()
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    making = preparation.begin(preparation.inspect_sources(config, shown=False), shown=False)
    pools, heard, killed = [], [], []

    def make(*args, **options):
        pools.append(_Workers(*args, **options))
        return pools[-1]

    monkeypatch.setattr(pool.concurrent.futures, "ProcessPoolExecutor", make)
    monkeypatch.setattr(pool.signal, "signal", lambda *args: heard.append(args))

    def thread(*, target, daemon):
        return types.SimpleNamespace(start=lambda: heard.append((target, daemon)))

    monkeypatch.setattr(pool.threading, "Thread", thread)
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")

    def child(name):
        return types.SimpleNamespace(kill=lambda: killed.append(name))

    children = [child("another's")]
    monkeypatch.setattr(pool.multiprocessing, "active_children", lambda: list(children))
    made, count = [], len(making.corpus.parts)
    keys = dict(skip_broken=False, made=made.append)

    def of(parts, workers):
        return pool.make(config, making.tokenizer, parts, making.partial, workers=workers, **keys)

    of(making.corpus.parts[:3], workers=2)
    assert sorted(part.index for part in made) == [0, 1, 2]
    assert making.partial.missing() == list(range(3, count))
    (found,) = pools
    assert (found.count, found.method) == (2, "spawn")
    assert found.ended == dict(wait=True, cancel_futures=True)
    assert heard == [(signal.SIGINT, signal.SIG_IGN), (pool._end_with_parent, True)]
    assert os.environ["RAYON_NUM_THREADS"] == "1" and pool._given[1]._threads == 1
    monkeypatch.setattr(pool.os, "_exit", heard.append)
    parent = types.SimpleNamespace(join=lambda: heard.append("the caller ended"))
    monkeypatch.setattr(pool.multiprocessing, "parent_process", lambda: parent)
    pool._end_with_parent()
    assert heard[2:] == ["the caller ended", 1]
    for error, kind, said in (
        (concurrent.futures.process.BrokenProcessPool("x"), UserError, "a worker of the prep.*was"),
        (DataError("a bad source"), DataError, "^a bad source$"),
    ):

        def fails(*args, error=error, **kwargs):
            children.append(child("a worker"))
            raise error

        monkeypatch.setattr(pool, "make_part", fails)
        with pytest.raises(kind, match=said):
            of(making.corpus.parts[3:], workers=99)
        assert pools[-1].count == count - 3 and pools[-1].ended
    assert set(killed) == {"a worker"}
    of(making.corpus.parts[:0], workers=2)
    assert len(pools) == 3


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_and_what_is_done_stays(config, tmp_path):
    die = "import os, signal\nfrom kvjax.data import pool\n"
    die += "make = pool.make_part\ndef die(config, part, *args, **kwargs):\n"
    die += "    if part.index == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
    die += "    make(config, part, *args, **kwargs)\n"
    die += "pool.make_part = die\n"
    script = tmp_path / "die.py"
    script.write_text(die + PREPARE)
    _, said = start(config, 2, script).communicate()
    assert "a worker of the preparation was killed" in said, said
    assert list(config.root.glob("datasets/.under-way-*/done/*"))
    prepare.prepare(config, workers=1)


# -- where it goes ---------------------------------------------------------------------------------


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
    made = []
    monkeypatch.setattr(pool, "make_part", noting(made))
    path = prepare.prepare(remote, workers=1)
    assert made == list(range(6, count))
    found = files(folder)
    last = max(folder.rglob("*"), key=lambda path: path.stat().st_mtime_ns * path.is_file())
    assert last.name == manifest.MANIFEST and str(path).endswith(folder.name)
    assert found.keys() == expected.keys()
    assert {n: c for n, c in found.items() if "array_record" in n} == {
        n: c for n, c in expected.items() if "array_record" in n
    }


@pytest.mark.slow
def test_several_workers_fill_a_bucket(config, expected, bucket, tmp_path):
    script = tmp_path / "remote.py"
    script.write_text(
        "import fsspec\nfrom etils import epath\nfrom kvjax.foundation import runtime\n"
        "from tests.buckets import Buckets\n"
        f"system = Buckets({str(bucket)!r}, fsspec.filesystem('file', auto_mkdir=True))\n"
        "type(epath.backend.fsspec_backend).fs = lambda self, path: system\n"
        "runtime.BUCKETS['gs'] = ('fsspec', '')\n" + PREPARE
    )
    remote = dataclasses.replace(config, directory="gs://out/data")
    process = start(remote, 3, script)
    _, said = process.communicate()
    assert not process.returncode, said
    (folder,) = (bucket / "out/data/datasets").iterdir()
    found = files(folder)
    assert found.keys() == expected.keys()
    differ = {name for name in found if found[name] != expected[name]}
    assert differ == {manifest.MANIFEST}  # it names the bucket


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


# -- beforehand ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plan_is_about_what_it_takes(config, capsys):
    arguments = [*config.command().split()[3:], "--plan", "--json", "--workers=2"]
    assert command_line.status(prepare.main, arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not list(config.root.glob("*"))  # nothing was prepared
    path = prepare.prepare(config, workers=1)
    splits = loader.open_dataset(path).info["splits"]

    def total(key):
        return sum(splits[split][key] for split in manifest.SPLITS)

    assert plan["parts"] == num_parts(config) and plan["folder"] == str(path)
    assert 0.9 < plan["text_bytes"] / total("bytes") < 1.1
    assert 0.6 < plan["tokens"] / total("tokens") < 1.6
    size = sum(file.stat().st_size for file in pathlib.Path(path).rglob("*array_record*"))
    assert 0.5 < plan["row_bytes"] / size < 2
    assert plan["seconds"] > 0 and plan["workers"] == 2
    assert command_line.status(prepare.main, arguments[:-2]) == 0
    assert "Already prepared" in capsys.readouterr().out


def test_a_tokenizer_learns_from_a_sample_of_all_parts(config, monkeypatch):
    corpus, seen = preparation.inspect_sources(config, shown=False), []
    monkeypatch.setattr(vocabulary, "TOKENIZER_CHARACTERS", 100 * len(corpus.parts))
    monkeypatch.setattr(tokenizer, "train", lambda texts, *_: seen.extend(texts))
    with pytest.raises(AttributeError):  # what it returns is no tokenizer
        preparation.begin(corpus, shown=False)
    assert {text.split()[0] for text in seen} == {"0", "1", "2"}  # the files
    assert len(corpus.parts) <= len(seen) <= 2 * len(corpus.parts)
    assert not {t for t in seen if source_kinds.is_held_out(t, config.validation_fraction)}


def test_time_by_the_plan(config):
    found = preparation_estimate.Estimate(
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
    assert found.rate == pytest.approx(1e7)
    assert found.seconds(1) == pytest.approx(10 + 100)
    assert found.seconds(5) == pytest.approx(10 + 20)
    assert found.seconds(7) == pytest.approx(10 + 20)  # two rounds for some
    assert found.seconds(1000) == pytest.approx(10 + 10)


class _Clock:
    """Each look at it is a second later than the one before."""

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
    found = preparation_estimate.estimate(corpus, workers=2)
    text_bytes = sum(len(text.encode()) for text in small_texts)
    learned = tokenizer.train(small_texts, 400)
    tokens = sum(1 + len(learned.encode(text)) for text in small_texts)
    assert found == preparation_estimate.Estimate(
        parts=1,
        source_bytes=os.path.getsize(small_config.source),
        text_bytes=pytest.approx(text_bytes),
        tokens=pytest.approx(tokens),
        row_bytes=pytest.approx(5 << 16),  # three blocks of rows, and what fills up two files
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
    found = preparation_estimate.Estimate(
        parts=len(corpus.parts), vocab_size=400, **sizes, **seconds
    )
    monkeypatch.setattr(preparation_estimate, "estimate", lambda corpus, workers: found)
    free = {"free": 3e9}
    monkeypatch.setattr(preparation_estimate, "_free", lambda folder: free["free"])

    def check(hours, corpus=corpus):
        return preparation_estimate.check(corpus, 1, hours, shown=False)

    check(2.0)
    check(None)
    folder, named = str(corpus.path.parent), f"config.data.source = {config.source!r}"
    with pytest.raises(UserError) as told:
        check(1.99)
    assert str(told.value) == (
        f"preparing {named} takes about 2.0 h here, with 1 processes: 2.5B tokens from 7.55 GB of "
        "text. Prepare it beforehand, on more cores or a cluster: "
        f"`{config.command()}` (--plan prints details), or raise the limit here: --prepare_hours=3"
    )
    with pytest.raises(UserError, match="takes about 2.0 h here"):
        prepare.prepare(config, workers=1, hours=1.0)
    assert not list(config.root.glob("datasets/.under-way-*"))
    free["free"] = 3e9 - 1
    with pytest.raises(UserError) as told:
        check(None)
    assert str(told.value) == (
        f"{folder} has 3.00 GB free, and preparing {named} needs about 3.00 GB there: free some "
        "space, or set config.data.directory (or $KVJAX_CACHE) to another disk"
    )
    making = preparation.begin(corpus, shown=False)
    making.make(workers=1, share=(1, 2), shown=False)  # every second part
    check(1.0)
    with pytest.raises(UserError, match="takes about 60 min here"):
        check(0.99)
    assert preparation_estimate.room(corpus, found, 3) == [(folder, 1.5e9, 3e9 - 1)]
    monkeypatch.setattr(preparation_estimate.tempfile, "gettempdir", lambda: "/temporary")
    remote = dataclasses.replace(corpus, path=epath.Path("gs://out/data/x"))
    a_part = 3e9 / len(corpus.parts)
    assert preparation_estimate.room(remote, found, 3) == [
        ("gs://out/data", 3e9, float("inf")),
        ("/temporary", 3 * a_part, 3e9 - 1),
    ]


def test_of_many_parts_some_are_sampled_from_their_start(config, monkeypatch, tmp_path):
    """With a smaller vocabulary where they have too little text for the one that is asked for."""
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
    found = preparation_estimate.estimate(corpus, workers=1)
    count = len(corpus.parts)
    step = count // 8
    assert [index for index, _ in sampled] == [*range(step // 2, count, step)][:8]
    assert found.parts == count and found.vocab_size == 512
    size = (tmp_path / "validation.txt").stat().st_size
    assert preparation_estimate._held_out(corpus) == size / corpus.bytes


def test_progress_is_what_is_done_its_rate_and_what_is_left(monkeypatch):
    clock = iter((100.0, 104.0, 104.0))
    monkeypatch.setattr(preparation, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    progress_text = preparation._ProgressText(10**9, 8 * 10**8)
    said = [progress_text.text(types.SimpleNamespace(bytes=size)) for size in (10**8, 7 * 10**8)]
    assert said == [
        f"tokenizing {progress.bar(0.3)}, 300.0 MB of 1.00 GB, 25.0 MB/s, "
        f"{progress.duration(28)} left",
        f"tokenizing {progress.bar(1)}, 1.00 GB of 1.00 GB, 200.0 MB/s, "
        f"{progress.duration(0)} left",
    ]
