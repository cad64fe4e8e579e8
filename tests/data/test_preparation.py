"""A corpus of many parts: the same bytes however it was made, killed or not, and no text twice."""

import collections
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvjax.data import estimate
from kvjax.data import loader
from kvjax.data import manifest
from kvjax.data import parts
from kvjax.data import pool
from kvjax.data import preparation
from kvjax.data import prepare
from kvjax.data import readers
from kvjax.data import sources
from kvjax.data import tokenized_part
from kvjax.data import tokenizer
from kvjax.data import under_way
from kvjax.data import vocabulary
from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import UserError
from tests.job import Job

PART = 1000  # bytes
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
def config(small_config, small_texts, tmp_path, write_jsonl, monkeypatch):
    """About twenty parts, in a cache of their own."""
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    monkeypatch.setattr(parts, "_ROWS", 1)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(3):
        write_jsonl(folder / f"{i}.jsonl", [f"{i} {text}" for text in small_texts[i::3]])
    return dataclasses.replace(small_config, source=str(folder), directory="")


def num_parts(config) -> int:
    """Of a corpus."""
    return len(parts.parts(config, sources.fingerprints(config)))


def files(folder) -> dict[str, bytes]:
    """By path, the bytes of every file."""
    folder = pathlib.Path(folder)
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


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


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(config, expected, workers):
    assert files(prepare.prepare(config, workers=workers)) == expected


def test_no_document_is_lost_or_twice_and_none_of_validation_in_training(config, small_texts):
    dataset = loader.open_dataset(prepare.prepare(config, workers=1))
    bos, found = dataset.tokenizer.bos_id, {}
    for split in sources.SPLITS:
        documents = collections.Counter()
        for shard in _shards(dataset, split):
            for tokens in _documents(shard, bos):
                text = dataset.tokenizer.decode(tokens)
                documents[hashlib.blake2b(text.encode()).digest()] += 1
        found[split] = documents
    digest = lambda text: hashlib.blake2b(text.encode()).digest()
    texts = [f"{i} {text}" for i in range(3) for text in small_texts[i::3]]
    held_out = {t for t in texts if sources.is_held_out(t, config.validation_fraction)}
    assert found["validation"] == collections.Counter(map(digest, held_out))
    trained = collections.Counter(digest(t) for t in texts if t not in held_out)
    assert max(found["train"].values()) == 1
    # What does not fill a part's last row is left out: a document or so of each, perhaps cut.
    count = num_parts(config)
    lost, cut = trained - found["train"], found["train"] - trained
    assert sum(lost.values()) <= 2 * count and sum(cut.values()) <= count


def _shards(dataset, split):
    """By part, the tokens of its rows as one stream."""
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


def test_two_training_processes_share_it(config, expected, tmp_path):
    given = json.dumps([dataclasses.asdict(config), PART])
    job = Job([["tests.job", "prepared", given]] * 2, devices=1, logs=tmp_path / "logs")
    found = [json.loads(output.splitlines()[-1]) for output in job.succeed()]
    count = num_parts(config)
    assert [f["made"] for f in found] == [list(range(0, count, 2)), list(range(1, count, 2))]
    assert found[0]["path"] == found[1]["path"] and files(found[0]["path"]) == expected


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(config, expected, tmp_path):
    """Of a preparation by three processes; none of them outlives it."""
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
    count = lambda: len(list(datasets.glob(".under-way-*/done/*")))
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
    abandoned = folder / f"work-{under_way._here()}-999999999-x"
    abandoned.mkdir()
    (abandoned / shards[8].name).write_bytes(b"half")
    made = []
    monkeypatch.setattr(pool, "make_part", _noting(made))
    path = prepare.prepare(config, workers=1)
    assert made == [3, 5, *range(9, num_parts(config))]
    assert files(path) == expected


def _noting(made):
    """As `pool.make_part`, and appends the part's index to a list."""
    make_part = pool.make_part

    def make(config, part, *args, **kwargs):
        made.append(part.index)
        make_part(config, part, *args, **kwargs)

    return make


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


def test_a_source_that_changed_between_attempts_is_refused(config, monkeypatch):
    _stop_after(monkeypatch, config, 4)
    path = pathlib.Path(config.source) / "1.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"text": "one more"}\n')
    with pytest.raises(DataError, match=r"changed since its preparation was begun \(\S+1\.jsonl\)"):
        prepare.prepare(config, workers=1)
    path.write_bytes(before)
    prepare.prepare(config, workers=1)


def test_what_was_made_of_a_source_that_changed_is_made_again(config, expected, monkeypatch):
    """Although it is as it was in the end: a part may have been made of the other text."""
    making = preparation.begin(preparation.look(config, shown=False), shown=False)
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


def test_another_corpus_of_the_same_pattern_is_no_change(config, tmp_path, monkeypatch):
    relative = dataclasses.replace(config, source="*.jsonl")
    monkeypatch.chdir(config.source)
    _stop_after(monkeypatch, relative, 4)
    other = tmp_path / "other"
    other.mkdir()
    for path in pathlib.Path(config.source).iterdir():
        (other / path.name).write_bytes(path.read_bytes().replace(b"o", b"i"))
    monkeypatch.chdir(other)
    prepare.prepare(relative, workers=1)


def test_what_a_plan_is_missing_for_is_made_anew(config, expected, monkeypatch, capsys):
    _stop_after(monkeypatch, config, 4)
    (folder,) = config.root.glob("datasets/.under-way-*")
    (folder / under_way.PLAN).write_text("")
    assert files(prepare.prepare(config, workers=1)) == expected
    assert "does not say what is made there" in capsys.readouterr().err


def test_the_second_of_two_leaves_nothing_behind(config, expected):
    corpus = preparation.look(config, shown=False)
    making = preparation.begin(corpus, shown=False)
    making.make(workers=1, shown=False)
    making.finish()
    late = preparation.begin(corpus, shown=False)
    late.make(workers=1, shown=False)
    assert files(late.finish()) == expected
    assert not list(config.root.glob("datasets/.under-way-*"))


def test_a_part_that_nobody_made_is_told(config):
    making = preparation.begin(preparation.look(config, shown=False), shown=False)
    with pytest.raises(DataError, match=r"\d+ of \d+ parts are not made \(the first is 0\)"):
        making.finish()


def test_a_bucket_s_listing_is_not_remembered(config, bucket, monkeypatch):
    """What workers wrote is seen, though the launcher looked before."""
    remote = dataclasses.replace(config, directory="gs://out/data")
    _stop_after(monkeypatch, remote, 6)
    asked = []
    monkeypatch.setattr(under_way, "forget_listings", lambda path: asked.append(str(path)))
    making = preparation.begin(preparation.look(remote, shown=False), shown=False)
    making.under_way.missing()
    assert asked and all(path.endswith("/done") for path in asked)


def test_a_prepared_corpus_is_found_without_opening_its_sources(config, monkeypatch):
    path = prepare.prepare(config, workers=1)
    monkeypatch.setattr(sources, "check", lambda *_: pytest.fail("opened"))
    assert prepare.prepare(config) == path


def test_a_source_that_changes_meanwhile_is_refused(config, monkeypatch):
    making = preparation.begin(preparation.look(config, shown=False), shown=False)
    making.make(workers=1, shown=False)
    (pathlib.Path(config.source) / "2.jsonl").write_text('{"text": "something else"}\n')
    with pytest.raises(DataError, match=r"2\.jsonl.*Put back what it was, or remove"):
        making.finish()
    assert not list(config.root.glob("datasets/[!.]*"))


def test_other_code_does_not_go_on(config, monkeypatch):
    _stop_after(monkeypatch, config, 4)
    monkeypatch.setattr(preparation, "code", lambda: "other")
    with pytest.raises(DataError, match="begun by other code or with another plan .*now 'other'"):
        prepare.prepare(config, workers=1)


def test_with_nothing_done_an_earlier_attempt_is_no_hindrance(config, monkeypatch):
    _stop_after(monkeypatch, config, 0)
    monkeypatch.setattr(preparation, "code", lambda: "other")
    prepare.prepare(config, workers=1)


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


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.fixture
def broken(config, small_texts):
    """A broken line, a row group with flipped bytes and a file without its end; what is whole."""
    folder = pathlib.Path(config.source)
    lines = (folder / "1.jsonl").read_text().splitlines()
    lines[5] = lines[5][: len(lines[5]) // 2]
    (folder / "1.jsonl").write_text("\n".join(lines) + "\n")
    texts = [f"p {text}" for text in small_texts]
    pq.write_table(
        pa.table({"text": texts}), folder / "3.parquet", row_group_size=50, compression="zstd"
    )
    metadata = pq.ParquetFile(folder / "3.parquet").metadata
    place = metadata.row_group(1).column(0).data_page_offset
    content = bytearray((folder / "3.parquet").read_bytes())
    (folder / "4.parquet").write_bytes(content[: len(content) // 2])
    content[place : place + 200] = bytes(200)
    (folder / "3.parquet").write_bytes(content)
    return config


def test_what_cannot_be_read_stops_a_preparation(broken):
    folder = pathlib.Path(broken.source)
    with pytest.raises(DataError, match=r"4\.parquet is no whole Parquet file"):
        prepare.prepare(broken, workers=1)
    (folder / "4.parquet").unlink()
    with pytest.raises(DataError, match=r"1\.jsonl, the line at byte \d+ is no JSON") as told:
        prepare.prepare(broken, workers=2)
    byte = int(re.search(r"at byte (\d+) is", str(told.value)).group(1))
    content = (folder / "1.jsonl").read_bytes()[byte:]
    with pytest.raises(json.JSONDecodeError):
        json.loads(content.partition(b"\n")[0])


def test_skip_broken_leaves_it_out_and_lists_it(broken, small_texts):
    path = prepare.prepare(broken, workers=1, skip_broken=True)
    info = loader.open_dataset(path).info
    said = info["left_out"]
    assert said["count"] == 3 == len(said["first"])
    for what in ("4.parquet is no whole", "is no JSON", "3.parquet: row group 1 of 4"):
        assert sum(what in text for text in said["first"]) == 1
    documents = sum(info["splits"][split]["documents"] for split in sources.SPLITS)
    assert documents == len(small_texts) - 1 + len(small_texts) - 50
    with pytest.raises(DataError):  # what is whole is other data
        prepare.prepare(broken, workers=1)


def test_what_a_disk_fails_to_read_is_not_left_out(config, monkeypatch):
    """It may be read the next time: a line, or the header of a Parquet file."""
    table = pathlib.Path(config.source) / "3.parquet"
    pq.write_table(pa.table({"text": ["one", "two"]}), table)
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    for module, name, failing in ((readers.json_text, "parse", 40), (pq, "ParquetFile", 2)):
        real, calls = getattr(module, name), []

        def fails(*args, real=real, calls=calls, failing=failing, **kwargs):
            calls.append(1)
            if len(calls) > failing:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            with pytest.raises(UserError, match="could not be read: Input/output error.*again"):
                prepare.prepare(config, workers=1, skip_broken=True)
    info = loader.open_dataset(prepare.prepare(config, workers=1, skip_broken=True)).info
    assert info["left_out"] == dict(count=0, first=[])


def test_a_text_of_another_encoding_is_left_out_as_a_whole(config):
    (pathlib.Path(config.source) / "3.txt").write_bytes("héllo\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"3\.txt is UTF-16 text.*Convert it"):
        prepare.prepare(config, workers=1)
    info = loader.open_dataset(prepare.prepare(config, workers=1, skip_broken=True)).info
    assert info["left_out"]["count"] == 1 and "3.txt is UTF-16" in info["left_out"]["first"][0]


def test_of_much_that_is_left_out_a_hundred_messages_are_kept(config, monkeypatch):
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    monkeypatch.setattr(tokenized_part, "QUOTED", 3)
    path = pathlib.Path(config.source) / "1.jsonl"
    path.write_bytes(b"{\n" * 500 + path.read_bytes())
    info = loader.open_dataset(prepare.prepare(config, workers=1, skip_broken=True)).info
    assert info["left_out"]["count"] == 500 and 3 <= len(info["left_out"]["first"]) <= 100


# -- mending ---------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(config):
    """A preparation that a broken last line of 2.jsonl ended; what the line was, and the rest."""
    path = pathlib.Path(config.source) / "2.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 9])
    # The tokenizer learns from a part's start: what is broken behind that, it does not see.
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    with pytest.raises(DataError, match=r"2\.jsonl, the line at byte"):
        prepare.prepare(config, workers=1)
    return config, path, whole


def _afresh(config, tmp_path, monkeypatch, **options):
    """The files that a preparation makes in an empty cache."""
    with monkeypatch.context() as patch:
        patch.setenv("KVJAX_CACHE", str(tmp_path / "afresh"))
        return files(prepare.prepare(config, workers=1, **options))


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_file_that_is_mended_costs_its_own_parts(
    config, bucket, tmp_path, monkeypatch, capsys, where
):
    if where == "bucket":
        config = dataclasses.replace(config, directory="gs://out/data")
    path = pathlib.Path(config.source) / "1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 9])
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    with pytest.raises(DataError, match=r"1\.jsonl, the line at byte"):
        prepare.prepare(config, workers=1)
    path.write_bytes(whole)
    made = []
    monkeypatch.setattr(pool, "make_part", _noting(made))
    prepared = prepare.prepare(config, workers=1)
    cut = parts.parts(config, sources.fingerprints(config))
    own = {part.index for part in cut for piece in part.slices if piece.name == str(path)}
    last = max(part.index for part in cut)
    assert own <= set(made) == set(range(min(own), last + 1))  # what was not made yet, too
    assert "parts stay that" in capsys.readouterr().err
    folder = pathlib.Path(str(prepared).replace("gs://", f"{bucket}/"))
    found = files(folder)
    expected = _afresh(dataclasses.replace(config, directory=""), tmp_path, monkeypatch)
    assert found.keys() == expected.keys() and len(found) > 20
    differ = {name for name in found if found[name] != expected[name]}
    assert differ == ({manifest.MANIFEST} if where == "bucket" else set())  # it names the bucket
    assert len(list(folder.parent.iterdir())) == 1


def test_a_broken_file_that_is_taken_away_costs_its_own_parts(interrupted, tmp_path, monkeypatch):
    config, path, _ = interrupted
    path.unlink()
    made = []
    monkeypatch.setattr(pool, "make_part", _noting(made))
    found = files(prepare.prepare(config, workers=1))
    assert len(made) <= 1  # the last one of the files before, where it shared a part
    assert found == _afresh(config, tmp_path, monkeypatch)


def test_leaving_out_what_is_broken_costs_one_part(interrupted, tmp_path, monkeypatch):
    config, _, _ = interrupted
    made = []
    monkeypatch.setattr(pool, "make_part", _noting(made))
    found = files(prepare.prepare(config, workers=1, skip_broken=True))
    assert made == [num_parts(config) - 1]
    assert found == _afresh(config, tmp_path, monkeypatch, skip_broken=True)


def test_where_something_was_left_out_is_made_again_without_skip_broken(
    config, tmp_path, monkeypatch
):
    path = pathlib.Path(config.source) / "0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"{\n" + whole)
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    make_part, made = pool.make_part, []

    def fails(*args, **kwargs):
        if len(made) == 5:
            raise UserError("enough")
        made.append(make_part(*args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(pool, "make_part", fails)
        with pytest.raises(UserError, match="enough"):
            prepare.prepare(config, workers=1, skip_broken=True)
    with pytest.raises(DataError, match=r"0\.jsonl, line 1 is no JSON"):
        prepare.prepare(config, workers=1)
    path.write_bytes(whole)
    assert files(prepare.prepare(config, workers=1)) == _afresh(config, tmp_path, monkeypatch)


def test_another_file_that_changed_is_no_mending(interrupted):
    config, path, whole = interrupted
    path.write_bytes(whole)
    other = path.with_name("0.jsonl")
    other.write_bytes(other.read_bytes().replace(b"o", b"i"))
    with pytest.raises(DataError, match=r"changed since its preparation was begun \(\S+0\.jsonl"):
        prepare.prepare(config, workers=1)


def test_a_folder_in_which_somebody_works_is_not_removed(interrupted):
    config, path, whole = interrupted
    (folder,) = config.root.glob("datasets/.under-way-*")
    work = folder / f"work-{under_way._here()}-{os.getpid()}-living"
    work.mkdir()
    before = files(folder)
    path.write_bytes(whole)
    prepare.prepare(config, workers=1)
    assert files(folder) == before
    (folder / under_way.PLAN).write_text("")
    path.write_bytes(whole[: len(whole) - 9])
    with pytest.raises(DataError, match="another process is preparing there"):
        prepare.prepare(config, workers=1)


def test_the_command_lists_what_it_left_out(broken, capsys, monkeypatch):
    arguments = broken.command().split()[3:]
    assert command_line.status(prepare.main, [*arguments, "--skip_broken", "--workers=1"]) == 0
    err = capsys.readouterr().err
    assert err.count("left out: ") == 3
    assert command_line.status(prepare.main, [*arguments, "--workers=-1"]) == 2


# -- where it goes ---------------------------------------------------------------------------------


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
    monkeypatch.setattr(pool, "make_part", _noting(made))
    path = prepare.prepare(remote, workers=1)
    assert made == list(range(6, count))
    found = files(folder)
    last = max(folder.rglob("*"), key=lambda path: path.stat().st_mtime_ns * path.is_file())
    assert last.name == manifest.MANIFEST and str(path).endswith(folder.name)
    assert found.keys() == expected.keys()
    assert {n: c for n, c in found.items() if "array_record" in n} == {
        n: c for n, c in expected.items() if "array_record" in n
    }


def test_a_target_without_room_is_told_before_and_when_it_happens(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(estimate, "_free", lambda folder: 1000)
        with pytest.raises(UserError, match=r"has 0\.0 MB free, and preparing config.data.source"):
            prepare.prepare(config, workers=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match="prepared data cannot be written to .*has room"):
            prepare.prepare(config, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    prepare.prepare(config, workers=1)


# -- beforehand ------------------------------------------------------------------------------------


def test_the_plan_is_about_what_it_takes(config, capsys):
    arguments = [*config.command().split()[3:], "--plan", "--json", "--workers=2"]
    assert command_line.status(prepare.main, arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not list(config.root.glob("*"))  # nothing was prepared
    path = prepare.prepare(config, workers=1)
    splits = loader.open_dataset(path).info["splits"]
    total = lambda key: sum(splits[split][key] for split in sources.SPLITS)
    assert plan["parts"] == num_parts(config) and plan["folder"] == str(path)
    assert 0.9 < plan["text_bytes"] / total("bytes") < 1.1
    assert 0.6 < plan["tokens"] / total("tokens") < 1.6
    size = sum(file.stat().st_size for file in pathlib.Path(path).rglob("*array_record*"))
    assert 0.5 < plan["row_bytes"] / size < 2
    assert plan["seconds"] > 0 and plan["workers"] == 2
    assert command_line.status(prepare.main, arguments[:-2]) == 0
    assert "It is prepared" in capsys.readouterr().out


def test_a_tokenizer_learns_from_a_sample_of_all_parts(config, monkeypatch):
    corpus, seen = preparation.look(config, shown=False), []
    monkeypatch.setattr(vocabulary, "TOKENIZER_CHARACTERS", 100 * len(corpus.parts))
    monkeypatch.setattr(tokenizer, "train", lambda texts, size: seen.extend(texts))
    with pytest.raises(AttributeError):  # what it returns is no tokenizer
        preparation.begin(corpus, shown=False)
    assert {text.split()[0] for text in seen} == {"0", "1", "2"}  # the files
    assert len(corpus.parts) <= len(seen) <= 2 * len(corpus.parts)
    assert not {t for t in seen if sources.is_held_out(t, config.validation_fraction)}


def test_time_by_the_plan(config):
    found = estimate.Estimate(
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


def test_a_run_does_not_prepare_for_hours_without_a_word(config, monkeypatch):
    real = estimate.estimate

    def slow(corpus, workers):
        return dataclasses.replace(real(corpus, workers), text_bytes=1e12)

    monkeypatch.setattr(estimate, "estimate", slow)
    with pytest.raises(
        UserError, match=r"takes about [\d.,]+ h here.*kvjax.data.prepare.*--prepare_"
    ):
        prepare.prepare(config, workers=2, hours=1.0)
    assert not list(config.root.glob("datasets/.under-way-*"))
    prepare.prepare(config, workers=1, hours=1e9)
