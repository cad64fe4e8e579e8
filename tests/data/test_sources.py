"""Sources: splits, globs, fingerprints, TFDS, buckets; unusable sources are refused."""

import collections
import hashlib
import json
import lzma
import os
import shutil

from hypothesis import given, settings, strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvjax.data import (
    config as config_lib,
    lookups,
    manifest,
    matching,
    readers,
    source_kinds,
    sources,
)
from tests.data.corpora import joined, write_jsonl


def documents(split, **keys):
    """Returns the documents of a split of a config."""
    return joined(sources.pieces(config_lib.DataConfig(**keys), split))


def split_texts(**keys):
    """Returns the documents of both splits; one split may be empty."""
    texts = []
    for split in manifest.SPLITS:
        try:
            texts.append(documents(split, **keys))
        except readers.EmptySplitError:
            texts.append([])
    return texts


@settings(deadline=None)
@given(
    texts=st.lists(st.text(max_size=4), min_size=1, max_size=40),
    fraction=st.floats(0.05, 0.95),
    suffix=st.sampled_from([".jsonl", ".parquet"]),
)
def test_records_are_in_one_split_and_no_text_in_both(tmp_path_factory, texts, fraction, suffix):
    path = tmp_path_factory.getbasetemp() / f"records{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, texts)
    else:
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    if not any(texts):
        with pytest.raises(readers.SourceError, match="has no documents"):
            documents("train", source=str(path))
        return
    train, validation = split_texts(source=str(path), validation_fraction=fraction)
    assert not set(train) & set(validation)
    assert collections.Counter(train + validation) == collections.Counter(t for t in texts if t)


@given(
    lines=st.lists(st.text(alphabet="abcé \f", max_size=12), min_size=1, max_size=30),
    fraction=st.floats(0.01, 0.99),
)
def test_text_file_is_cut_once_at_a_line(tmp_path_factory, lines, fraction):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    content = "\n".join(lines)
    path.write_bytes(content.encode())
    if not content.replace("\f", ""):
        return
    train, validation = split_texts(source=str(path), validation_fraction=fraction)
    head, tail = "".join(train), "".join(validation)
    assert head + tail == content.replace("\f", "")
    assert len(tail.encode()) <= fraction * len(content.encode())
    assert not tail or not head or head.endswith("\n")


def test_embedded_validation_is_the_last_200000_bytes_of_each_book():
    train, validation = split_texts(source="embedded")
    assert not set(train) & set(validation)
    for book in source_kinds.BOOKS:
        text = lzma.decompress((source_kinds.CORPUS / book).read_bytes()).decode()
        tail = text.encode()[-source_kinds.EMBEDDED_VALIDATION_BYTES :].decode(errors="ignore")
        expected = tail.split("\n", 1)[1].split("\f")
        assert 199_000 < sum(len(document.encode()) for document in expected)
        start = validation.index(expected[0])
        assert validation[start : start + len(expected)] == expected
        assert text.startswith(
            train[0] if book == source_kinds.BOOKS[0] else "The First Book of Moses"
        )
    # 42 works of Shakespeare and 66 books of the Bible; each file's split cuts one of them in two.
    assert len(train) + len(validation) == 42 + 66 + 2


def test_lookups_state_every_fact_twice_and_hold_no_held_out_text():
    train, validation = split_texts(source="embedded:lookups")
    every = train + validation
    assert len(every) == lookups.COUNT == len(set(every)) and validation
    named = config_lib.DataConfig(source="embedded:lookups")
    first = sources.fingerprint(named)
    source_kinds._lookups.cache_clear()
    assert sources.fingerprint(named) == first
    with_passages = 0
    for document in every:
        lines = document.split("\n")
        facts = next(
            n
            for n in range(16, 1, -1)
            if len(set(lines[-n:])) == n and set(lines[-n:]) <= set(lines[:-n])
        )
        with_passages += len(lines) > 2 * facts
    assert 0.4 < with_passages / len(every) < 0.6
    read, held_out = split_texts(source="embedded")
    seen = {line.strip() for text in read for line in text.split("\n")}
    unseen = {
        line.strip() for text in held_out for line in text.split("\n") if len(line) > 20
    } - seen
    assert len(unseen) > 1000
    assert not unseen & {line.strip() for document in every for line in document.split("\n")}


def test_globs_folders_and_lists_are_read_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.jsonl", "notes.md"):
        (tmp_path / name).write_text('{"text": "c"}\n' if name.endswith("l") else name[0] + "\n")
    validation_keys = dict(validation_source=str(tmp_path / "c.jsonl"))
    assert documents("train", source=f"{tmp_path}/*.txt", **validation_keys) == ["a\n", "b\n"]
    assert documents("train", source=str(tmp_path), **validation_keys) == ["a\n", "b\n", "c"]
    two_files = f"{tmp_path}/b.txt, {tmp_path}/a.t?t"
    assert documents("train", source=two_files, **validation_keys) == ["b\n", "a\n"]
    assert documents("validation", source=two_files, **validation_keys) == ["c"]


def test_existing_paths_are_no_globs_and_hidden_files_are_skipped(tmp_path):
    """A path that exists is not read as a glob; globs and folders skip hidden files, as in bash."""
    for name in (
        *("data[1].jsonl", "data1.jsonl", "B.JSONL", "c.json.gz", "d.ndjson", "e.parquet"),
        *("._d.ndjson", ".hidden.jsonl", "_SUCCESS", ".e.parquet.crc", "info.json", "notes.md"),
        *("in[2]/a.jsonl", "in[2]/b*.jsonl", "in[2]/bc.jsonl", ".cache/x.jsonl", "f.parquet/x"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    folder_files = ["B.JSONL", "c.json.gz", "d.ndjson", "data1.jsonl", "data[1].jsonl", "e.parquet"]
    for pattern, expected in {
        "": folder_files,
        "data[1].jsonl": ["data[1].jsonl"],
        "data[[]1].jsonl": ["data[1].jsonl"],
        "data[12].jsonl": ["data1.jsonl"],
        "data?.jsonl": ["data1.jsonl"],
        "*.jsonl": ["data1.jsonl", "data[1].jsonl"],
        "[!in]*": folder_files,
        ".h*": [".hidden.jsonl"],
        ".hidden.jsonl": [".hidden.jsonl"],
        "info.json": ["info.json"],
        "in[2]": ["in[2]/a.jsonl", "in[2]/b*.jsonl", "in[2]/bc.jsonl"],
        "in[2]/a*": ["in[2]/a.jsonl"],
        "in[2]/b*.jsonl": ["in[2]/b*.jsonl"],
        "*/*.jsonl": ["in[2]/a.jsonl", "in[2]/b*.jsonl", "in[2]/bc.jsonl"],
        ".cache/*": [".cache/x.jsonl"],
        "**/[Bb]*": ["B.JSONL", "in[2]/b*.jsonl", "in[2]/bc.jsonl"],
    }.items():
        matches = matching.files(f"{tmp_path}/{pattern}", source_kinds.SUFFIXES, "source = x", "")
        names = [path.relative_to(tmp_path).as_posix() for path in matches]
        assert names == expected, pattern


@pytest.mark.parametrize("key", ["source", "validation_source"])
def test_messages_on_unusable_sources_begin_with_their_key(tmp_path, key):
    (tmp_path / "good.txt").write_text("a\nb\n")
    (tmp_path / "bad").mkdir()
    for name in ("data.csv", "empty.txt", "empty.jsonl"):
        (tmp_path / "bad" / name).write_text("")
    os.mkfifo(tmp_path / "bad" / "pipe.ndjson")  # opening it would block
    (tmp_path / "bad" / "link.parquet").symlink_to("nowhere")
    (tmp_path / "none").mkdir()
    for spec, message in (
        ("none", "matches no file; give 'embedded'"),
        ("*.parquet", "matches no file; give 'embedded'"),
        ("none.txt", "matches no file; give 'embedded'"),
        ("bad/data.csv", r"data\.csv ends in none of \.txt"),
        ("bad/data[.]csv", r"data\.csv ends in none of \.txt"),
        ("bad/*.ndjson", r"pipe\.ndjson is a pipe, a device or a"),
        ("bad/*.parquet", r"link\.parquet is a pipe, a device or a broken link"),
        ("**x", "cannot be opened: Invalid pattern"),
        ("bad/empty.txt", "has no documents"),
        ("bad/empty.jsonl", "has no documents"),
        ("tfds:no_such_name", "cannot be opened"),
    ):
        value = spec if spec.startswith("tfds") else f"{tmp_path}/{spec}"
        keys = dict(source=str(tmp_path / "good.txt"), validation_source="embedded") | {key: value}
        kind = FileNotFoundError if "matches" in message else readers.SourceError
        with pytest.raises(kind, match=f"(?s)^config.data.{key} = .*: .*{message}"):
            documents("train" if key == "source" else "validation", **keys)


def test_empty_split_says_which_and_what_to_change(tmp_path):
    (tmp_path / "line.txt").write_text("one line only\n")
    with pytest.raises(readers.SourceError, match="the validation split is empty.* Raise it"):
        documents("validation", source=str(tmp_path / "line.txt"))
    path = write_jsonl(tmp_path / "texts.jsonl", ["a", "b"])
    with pytest.raises(readers.SourceError, match="the train split is empty.* Lower it"):
        documents("train", source=str(path), validation_fraction=0.999999)


def test_fingerprint_depends_on_content_and_split_not_on_the_path(tmp_path):
    def fingerprint(path, **keys):
        return sources.fingerprint(config_lib.DataConfig(source=str(path), **keys))

    first = write_jsonl(tmp_path / "first.jsonl", ["a", "b"])
    same = write_jsonl(tmp_path / "same.jsonl", ["a", "b"])
    other = write_jsonl(tmp_path / "other.jsonl", ["a", "c"])
    assert fingerprint(first) == fingerprint(same)
    assert fingerprint(first) != fingerprint(other)
    assert fingerprint(first) != fingerprint(first, validation_fraction=0.1)
    assert fingerprint(first) != fingerprint(first, validation_source=str(other))
    assert fingerprint(first) != fingerprint(f"{first},{other}")


def test_byte_order_mark_is_dropped_and_changes_the_fingerprint(tmp_path):
    """Earlier versions kept the mark as text and hashed the file's bytes alone."""
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfa\nb\nc\nd\n")
    assert split_texts(source=str(path), validation_fraction=0.5) == [["a\nb\n"], ["c\nd\n"]]

    def digest(content):
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    for content, has_mark in ((path.read_bytes(), True), (b"a\nb\nc\nd\n", False)):
        path.write_bytes(content)
        config = config_lib.DataConfig(source=str(path))
        earlier = repr(([f"txt {digest(content)}"], config.validation_fraction, "text"))
        assert (sources.fingerprint(config) != digest(earlier.encode())) == has_mark


def test_fingerprint_of_a_large_file_has_its_size_time_first_and_last_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(source_kinds, "HASHED_BYTES", 8)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 4)
    path = tmp_path / "large.txt"
    fingerprints = []
    for content, time in (
        (b"abcdefghi", 1),
        (b"abcdefghi", 2),
        (b"abcdefghX", 2),
        (b"abcdefghiX", 2),
    ):
        path.write_bytes(content)
        os.utime(path, (time, time))
        fingerprints.append(sources.fingerprint(config_lib.DataConfig(source=str(path))))
    assert len(set(fingerprints)) == 4


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A folder with the TFDS data set `small_words` prepared in it."""
    import tensorflow_datasets as tfds

    class SmallWords(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "number": np.int64}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {name: self._generate_examples(name) for name in ("train", "test")}

        def _generate_examples(self, name):
            for i in range(30):
                yield i, {"text": f"{name} é {i}\n", "number": i}

    folder = tmp_path_factory.mktemp("tfds")
    SmallWords(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_tfds_by_name(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    source = "tfds:small_words"
    train, validation = split_texts(source=source, validation_fraction=0.3)
    assert not set(train) & set(validation)
    assert set(train + validation) == {f"train é {i}\n" for i in range(30)}
    opened = source_kinds.open_source(source, "text", "")
    ranges = list(opened.ranges(100))
    texts = [p.text for r in ranges for _, p in opened.split_pieces(0.3, r, readers.raise_error)]
    assert texts == [f"train é {i}\n" for i in range(30)] and len(ranges) > 3
    test = documents("validation", source=source, validation_source="tfds:small_words:1.0.0#test")
    assert test == [f"test é {i}\n" for i in range(30)]


def test_messages_on_unusable_tfds_sets_have_a_remedy(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    build = r"python -m kvjax.data.prepare --source=tfds:%s --build_only$"
    info = tfds_folder / "small_words" / "1.0.0" / "dataset_info.json"
    # TFDS has a builder for newsroom, and opens the other name from its folder.
    converted_names = ("converted", "newsroom")
    for name in ("as_tfrecord", *converted_names):
        formats = ["array_record"] if name in converted_names else []
        shutil.copytree(info.parent, tfds_folder / name / "1.0.0")
        changed_info = json.loads(info.read_text()) | dict(name=name, fileFormat="tfrecord")
        changed_info |= dict(alternativeFileFormats=formats) if formats else {}
        (tfds_folder / name / "1.0.0" / info.name).write_text(json.dumps(changed_info))
        for file in (tfds_folder / name / "1.0.0").glob("small_words-*"):
            file.rename(file.with_name(file.name.replace("small_words", name)))
    for source, text_key, message in (
        ("small_words#dev", "text", r"no split 'dev'; it has \['train', 'test'\]"),
        ("small_words", "body", "no feature 'body'; it has .*Set config.data.text_key"),
        ("small_words", "number", "'number' is int, not text"),
        ("mnist", "text", f"opened: .*mnist/.* does not exist. Set TFDS_DATA_.*{build % 'mnist'}"),
        ("no_such_thing", "text", f"opened: .* catalogue and in {tfds_folder}: set TFDS_DATA_DIR"),
        ("a b", "text", "tfds:a b cannot be opened: .*"),
        (
            *("as_tfrecord", "text"),
            rf"as_tfrecord is prepared as tfrecord in {tfds_folder}/as_tfrecord/1.0.0, not as "
            rf"ArrayRecord. Convert it there: .*{build % 'as_tfrecord'}",
        ),
    ):
        with pytest.raises(readers.SourceError, match=message):
            documents("train", source=f"tfds:{source}", text_key=text_key)
    # `tfds convert_format` leaves fileFormat as it is and adds the new one to the alternatives.
    for name in converted_names:
        assert documents("train", source=f"tfds:{name}", validation_source="embedded") == [
            f"train é {i}\n" for i in range(30)
        ]


def test_buckets_are_read_through_epath(bucket):
    (bucket / "texts").mkdir()
    write_jsonl(bucket / "texts" / "one.jsonl", ["a", "b"])
    (bucket / "texts" / "two.txt").write_text("c\nd\n")
    validation_keys = dict(validation_source="gs://texts/two.txt")
    for source in ("gs://texts", "gs://texts/*", "gs://texts/one.jsonl,gs://texts/t?o.txt"):
        assert documents("train", source=source, **validation_keys) == ["a", "b", "c\nd\n"]
    assert documents("validation", source="gs://texts/two.txt", validation_fraction=0.5) == ["d\n"]
    with pytest.raises(FileNotFoundError, match="gs://texts/none.txt': matches no file"):
        documents("train", source="gs://texts/none.txt")


def test_a_file_cannot_be_in_both_splits(tmp_path):
    for name in ("train.txt", "validation.txt"):
        (tmp_path / name).write_text(f"the text of {name}\n")
    validation_keys = dict(validation_source=str(tmp_path / "validation.txt"))
    with pytest.raises(ValueError, match="has a file in common"):
        sources.fingerprint(
            config_lib.DataConfig(source=str(tmp_path / "*.txt"), **validation_keys)
        )
    sources.fingerprint(
        config_lib.DataConfig(source=str(tmp_path / "train.txt"), **validation_keys)
    )
