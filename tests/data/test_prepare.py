"""Every token is a target once, byte counts agree, and a data set is complete or absent."""

import dataclasses
import json
import lzma
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from kvjax.data import (
    config as config_lib,
    folders,
    loader,
    manifest,
    preparation,
    preparation_estimate,
    prepare,
    readers,
    source_kinds,
    tokenized_part,
    tokenizer as tokenizer_lib,
    vocabulary,
)
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import DataError, UserError
from tests.data.corpora import files


def stream(dataset, texts):
    """[BOS] + document, concatenated."""
    bos = dataset.tokenizer.bos_id
    return np.array([i for text in texts for i in [bos, *dataset.tokenizer.encode(text)]])


def rows(dataset, split):
    """int [rows, T + 1]: all rows of a split in order."""
    source = dataset.rows(split)
    return np.stack([source[i]["tokens"] for i in range(len(source))])


def split(texts, config):
    """Returns the texts of train and of validation, by definition."""
    held_out = [source_kinds.is_held_out(text, config.validation_fraction) for text in texts]
    return [
        [t for t, h in zip(texts, held_out, strict=True) if h == side] for side in (False, True)
    ]


def test_every_token_is_a_target_exactly_once(small_dataset, small_config, small_texts):
    T = small_config.sequence_length
    for name, texts in zip(manifest.SPLITS, split(small_texts, small_config), strict=True):
        tokens = stream(small_dataset, texts)
        rows_NT = rows(small_dataset, name)
        assert rows_NT.shape == (small_dataset.num_rows(name), T + 1)
        targets = rows_NT[:, 1:].ravel()
        if name == "train":
            assert len(tokens) - 1 - T < len(targets) <= len(tokens) - 1
            np.testing.assert_array_equal(targets, tokens[1 : 1 + len(targets)])
        else:
            padding = np.full(len(targets) - len(tokens) + 1, small_dataset.tokenizer.bos_id)
            assert len(padding) < T
            np.testing.assert_array_equal(targets, np.concatenate([tokens[1:], padding]))
        np.testing.assert_array_equal(rows_NT[1:, 0], rows_NT[:-1, -1])
        assert rows_NT[0, 0] == small_dataset.tokenizer.bos_id


def test_manifest_counts_what_is_there(small_dataset, small_config, small_texts):
    info = small_dataset.info
    for name, texts in zip(manifest.SPLITS, split(small_texts, small_config), strict=True):
        assert info["splits"][name] == {
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(stream(small_dataset, texts)),
            "rows": len(small_dataset.rows(name)),
        }
    counted = small_dataset.token_bytes[rows(small_dataset, "validation")[:, 1:]].sum()
    assert counted == info["splits"]["validation"]["bytes"]
    validation = "".join(split(small_texts, small_config)[1]).encode()
    xz = lzma.compress(validation, preset=9 | lzma.PRESET_EXTREME)
    assert info["xz_bits_per_byte"] == 8 * len(xz) / len(validation)
    assert info["config"] == dataclasses.asdict(small_config)
    assert info["tokenizer"]["vocab_size"] == 400


@pytest.mark.slow
def test_embedded_corpus_is_all_there(tmp_path):
    config = config_lib.DataConfig(directory=str(tmp_path))
    info = loader.open_dataset(prepare.prepare(config)).info
    splits = info["splits"]
    assert splits["train"]["bytes"] + splits["validation"]["bytes"] == 9_199_152  # Without \f.
    assert splits["validation"]["bytes"] == 399_627
    assert 2.45 < info["xz_bits_per_byte"] < 2.55


def test_tokenizer_has_seen_the_training_split_only(small_dataset, small_config, small_texts):
    train, _ = split(small_texts, small_config)
    assert small_dataset.tokenizer.to_json() == tokenizer_lib.train(train, 400).to_json()


def test_prepared_data_is_not_prepared_again(small_dataset, small_config, monkeypatch):
    monkeypatch.setattr(preparation, "begin", lambda *args: pytest.fail("written again"))
    monkeypatch.setattr(tokenizer_lib, "train", lambda *args: pytest.fail("trained again"))
    assert prepare.prepare(small_config) == small_dataset.path


def test_other_row_length_is_other_data_with_the_same_tokenizer(
    small_dataset, small_config, monkeypatch
):
    monkeypatch.setattr(tokenizer_lib, "train", lambda *args: pytest.fail("trained again"))
    path = prepare.prepare(dataclasses.replace(small_config, sequence_length=7))
    assert path != small_dataset.path
    longer = loader.open_dataset(path)
    assert longer.tokenizer.to_json() == small_dataset.tokenizer.to_json()
    np.testing.assert_array_equal(
        rows(longer, "train")[:, 1:].ravel()[:600],
        rows(small_dataset, "train")[:, 1:].ravel()[:600],
    )


def test_long_documents_and_small_batches_change_nothing(
    small_config, small_texts, monkeypatch, tmp_path
):
    for name, texts in (("train", small_texts[:150]), ("validation", small_texts[150:])):
        halves = ["".join(texts[::2]), "".join(texts[1::2])]
        (tmp_path / f"{name}.txt").write_text("\f".join(halves))
    config = dataclasses.replace(
        small_config,
        source=str(tmp_path / "train.txt"),
        validation_source=str(tmp_path / "validation.txt"),
        directory=str(tmp_path / "whole"),
    )
    uncut = loader.open_dataset(prepare.prepare(config))
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokenized_part, "BATCH_CHARACTERS", 500)
    config = dataclasses.replace(config, directory=str(tmp_path / "pieces"))
    pieces = loader.open_dataset(prepare.prepare(config))
    assert pieces.tokenizer.to_json() == uncut.tokenizer.to_json()
    for name in manifest.SPLITS:
        np.testing.assert_array_equal(rows(pieces, name), rows(uncut, name))
        assert pieces.info["splits"][name] == uncut.info["splits"][name]
        assert uncut.info["splits"][name]["documents"] == 2
    assert pieces.info["xz_bits_per_byte"] == uncut.info["xz_bits_per_byte"]


def test_too_little_text_for_one_row_is_told(small_config, tmp_path):
    config = dataclasses.replace(small_config, sequence_length=100_000, directory=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"train split has \d+ tokens.* = 100001: lower sequence_le"
    ):
        prepare.prepare(config)
    assert not list((tmp_path / "datasets").iterdir())


def test_tokenizer_that_loses_text_is_told(small_config, tmp_path):
    definition = json.loads(tokenizer_lib.byte_tokenizer().to_json())
    del definition["model"]["vocab"]["e"]
    (tmp_path / "lossy.json").write_text(json.dumps(definition))
    config = dataclasses.replace(
        small_config, tokenizer=str(tmp_path / "lossy.json"), directory=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"lossy\.json': loses text: the train split has \d+ b"):
        prepare.prepare(config)


def test_a_folder_that_cannot_be_written_is_told(small_config, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for directory, message in (
        (str(tmp_path / "file"), "config.data.directory = .*: must be a folder, and"),
        ("/proc/nothing", "cannot be written to /proc/nothing/.*KVJAX_CACHE"),
    ):
        with pytest.raises(UserError, match=message):
            prepare.prepare(dataclasses.replace(small_config, directory=directory))
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="KVJAX_CACHE = .*: must be a folder, and .*file is a file"):
        prepare.prepare(dataclasses.replace(small_config, directory=""))


KILLED_AT = """
import os, signal, sys
from unittest import mock
from kvjax.data import config, prepare
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
with mock.patch(sys.argv[1], die):
    prepare.prepare(config.DataConfig(**eval(sys.argv[2])))
"""


@pytest.mark.slow
def test_killed_preparation_leaves_nothing_half_made(small_config, tmp_path):
    config = dataclasses.replace(small_config, directory=str(tmp_path / "prepared"))
    root = config.root
    for stage in (
        "tokenizer.train",
        "tokenizer.Tokenizer.save",
        "folders.rename",  # The tokenizer's.
        "tokenizer.Tokenizer.encode_batch",
        "packed_rows.ShardWriter._write",
        "partial_dataset.PartialDataset.publish",
        "manifest.write",
        "folders.rename",  # The data set's: its tokenizer exists by now.
    ):
        keys = repr(dataclasses.asdict(config))
        child = subprocess.run(
            [sys.executable, "-c", KILLED_AT, f"kvjax.data.{stage}", keys], cwd=ROOT
        )
        assert child.returncode == -signal.SIGKILL
        assert not list(root.glob("datasets/[!.]*"))
        for folder in root.glob("tokenizers/[!.]*"):
            assert tokenizer_lib.load(folder / manifest.TOKENIZER).vocab_size > 0
    path = prepare.prepare(config)
    other = prepare.prepare(dataclasses.replace(config, directory=str(tmp_path / "fresh")))
    assert (path / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert files(path / "packed_rows") == files(other / "packed_rows")


def test_preparation_that_comes_second_leaves_the_first_one_alone(
    small_config, monkeypatch, tmp_path
):
    config = dataclasses.replace(small_config, directory=str(tmp_path))
    write, first = tokenized_part.write, []

    def write_after_another(*args, **kwargs):
        monkeypatch.setattr(tokenized_part, "write", write)
        first.append(prepare.prepare(config))
        (first[0] / "first").touch()
        return write(*args, **kwargs)

    monkeypatch.setattr(tokenized_part, "write", write_after_another)
    assert prepare.prepare(config) == first[0]
    assert (first[0] / "first").exists()
    assert [path.name for path in first[0].parent.iterdir()] == [first[0].name]


def test_abandoned_staging_is_removed_and_a_living_one_is_not(small_config, tmp_path, monkeypatch):
    """With several processes, each ignores folders that another one has removed."""
    remove = shutil.rmtree

    def twice(path, **options):
        remove(path)
        remove(path, **options)

    monkeypatch.setattr(folders, "shutil", types.SimpleNamespace(rmtree=twice))
    config = dataclasses.replace(small_config, directory=str(tmp_path))
    folder = tmp_path / "tokenizers"
    old, living = (folder / f"{folders.STAGING}{name}" for name in ("old", "living"))
    for folder in (old, living):
        folder.mkdir(parents=True)
        (folder / "tokens").write_text("")
        long_ago = time.time() - folders.ABANDONED_SECONDS - 60
        os.utime(folder, (long_ago, long_ago))
    os.utime(old / "tokens", (long_ago, long_ago))
    prepare.prepare(config)
    assert not old.exists()
    assert living.exists()


def test_bucket_gets_every_file_and_the_manifest_last(
    small_dataset, small_config, bucket, monkeypatch
):
    (bucket / "in").mkdir()
    (bucket / "in" / "a.jsonl").write_bytes(pathlib.Path(small_config.source).read_bytes())
    config = dataclasses.replace(small_config, source="gs://in/*.jsonl", directory="gs://out/data")
    path = prepare.prepare(config)
    assert str(path) == f"gs://out/data/datasets/{small_dataset.path.name}"
    local = bucket / "out/data/datasets" / path.name
    names = files(local)
    assert names.keys() == files(small_dataset.path).keys()
    assert max(names, key=lambda name: (local / name).stat().st_mtime_ns) == manifest.MANIFEST
    reopened = loader.open_dataset(path)
    assert reopened.info["splits"] == small_dataset.info["splits"]
    np.testing.assert_array_equal(
        rows(loader.open_dataset(local), "train"), rows(small_dataset, "train")
    )
    assert prepare.prepare(config) == path
    file = local / manifest.TOKENIZER
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(DataError, match=f"{path} is damaged: tokenizer.json has other bytes"):
        loader.open_dataset(path)


PLAN = [
    ["parts", "9"],
    ["sources", "3.00 GB"],
    ["text", "2.50 GB"],
    ["tokens", "750.0M"],
    ["rate per core", "2.5 MB/s"],
    ["of that, reading", "25 %"],
    ["of that, encoding", "50 %"],
    ["of that, writing", "25 %"],
    ["processes", "4"],
    ["time", "7 min"],
]


def test_the_command(small_config, small_dataset, small_texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)  # a busy machine's waits are no message

    def command(config, *more):
        arguments = [*config.command().split()[3:], *more]
        return command_line.status(prepare.main, arguments), *capsys.readouterr()

    folder = str(small_dataset.path)
    status, out, err = command(small_config)
    assert status == 0 and out.splitlines()[-1] == folder and not err
    info = json.loads(out.rpartition("}\n")[0] + "}")
    assert info["splits"] == small_dataset.info["splits"]
    status, out, _ = command(small_config, "--json")
    assert status == 0 and json.loads(out) == info | dict(folder=folder)
    prepared = dataclasses.replace(small_config, source=f"prepared:{folder}")
    for config in (small_config, prepared):
        status, out, err = command(config, "--plan")
        assert (status, err) == (0, "") and "Already prepared:" in out
        assert "".join(out.split()).endswith("".join(folder.split()))  # wrapped to the terminal
        assert json.loads(command(config, "--plan", "--json")[1]) == dict(folder=folder)

    broken = tmp_path / "broken.jsonl"
    lines = [json.dumps({"text": text}) for text in small_texts]
    broken.write_text("\n".join([*lines, "{", *lines]) + "\n")
    config = dataclasses.replace(small_config, source=str(broken), directory=str(tmp_path / "out"))
    estimate = preparation_estimate.Estimate(
        9, 3 * 10**9, 2.5e9, 7.5e8, 1.5e9, 300, 1e-7, 2e-7, 1e-7, 3e-8
    )
    monkeypatch.setattr(preparation_estimate, "estimate", lambda corpus, workers: estimate)
    monkeypatch.setattr(preparation_estimate, "_free", lambda folder: 5e9)
    status, out, err = command(config, "--plan", "--skip_broken", "--workers=4")
    assert status == 0
    shown = (re.split(r"  +", line.strip()) for line in out.splitlines())
    assert [row for row in shown if len(row) == 2 and "-" not in row[0]] == PLAN
    assert "Tokens are counted with a vocabulary of 300" in out and "network" not in out
    status, out, _ = command(config, "--plan", "--skip_broken", "--workers=4", "--json")
    result = json.loads(out)
    seconds = 0.03e-6 * vocabulary.TOKENIZER_CHARACTERS + 2.5e9 / 2.5e6 / 3  # of 9 parts at most 3
    expected = dataclasses.asdict(estimate) | dict(workers=4, seconds=pytest.approx(seconds))
    room = result.pop("room")
    assert result.pop("folder").startswith(str(tmp_path / "out")) and result == expected
    assert [(entry["needed"], entry["free"]) for entry in room] == [(1.5e9, 5e9)]

    status, _, err = command(config)
    assert status == 2 and err.startswith("kvjax: ") and "broken.jsonl" in err
    status, out, err = command(config, "--skip_broken")
    assert status == 0 and "skipped: " in err and "broken.jsonl" in err
    for source, message in (
        ("none.txt", "matches no file"),
        ("mixture", "conversations are prepared by the run"),
    ):
        status, out, err = command(small_config, f"--source={source}")
        assert (status, out) == (2, "") and f"kvjax: --source = {source!r}: {message}" in err
    status, _, err = command(small_config, "--workers=-1")
    assert status == 2 and "--workers=-1: must be at least 1" in err


def test_prepared_data_need_no_source(small_config, small_dataset):
    config = dataclasses.replace(small_config, source=f"prepared:{small_dataset.path}")
    assert prepare.prepare(config) == small_dataset.path


def test_a_log_names_every_stage(small_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0)
    config = dataclasses.replace(small_config, directory=str(tmp_path))
    prepare.prepare(config, shown=False)
    assert capsys.readouterr().err == ""
    prepare.prepare(dataclasses.replace(config, directory=str(tmp_path / "shown")))
    stderr = capsys.readouterr().err
    size = f"{pathlib.Path(config.source).stat().st_size / 1e6:.1f} MB"
    for stage in (
        "kvjax: inspecting config.data.source, 1 files",
        "kvjax: opening the sources",
        "kvjax: training 400 tokens on",
        f"kvjax: tokenizing {progress.bar(1)}, {size} of {size}, ",
    ):
        assert stage in stderr
