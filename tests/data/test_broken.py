"""Unreadable sources and records: refused, or skipped and listed."""

import dataclasses
import errno
import json
import os
import pathlib
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvjax.data import (
    loader,
    manifest,
    partial_dataset,
    prepare,
    tokenizer,
)
from kvjax.foundation import command_line, json_text
from kvjax.foundation.errors import DataError, UserError
from tests.data.corpora import begin_preparation


@pytest.fixture
def broken(config, small_texts):
    """Breaks a line of JSON, a row group of one Parquet file and the end of another."""
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


def test_what_cannot_be_read_stops_a_preparation(broken, monkeypatch):
    folder = pathlib.Path(broken.source)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "train", lambda *_: pytest.fail("work was done"))
        with pytest.raises(DataError, match=r"4\.parquet is not a complete Parquet file"):
            prepare.prepare(broken, workers=1)
    (folder / "4.parquet").unlink()
    with pytest.raises(DataError, match=r"1\.jsonl, the line at byte \d+ is not JSON") as raised:
        prepare.prepare(broken, workers=2)
    byte = int(re.search(r"at byte (\d+) is", str(raised.value)).group(1))
    content = (folder / "1.jsonl").read_bytes()[byte:]
    with pytest.raises(json.JSONDecodeError):
        json.loads(content.partition(b"\n")[0])


@pytest.mark.slow
def test_skip_broken_leaves_it_out_and_lists_it(broken, small_texts):
    path = prepare.prepare(broken, workers=1, skip_broken=True)
    info = loader.open_dataset(path).info
    left_out = info["left_out"]
    assert left_out["count"] == 3 == len(left_out["first"])
    for problem in ("4.parquet is not a complete", "is not JSON", "3.parquet: row group 1 of 4"):
        assert sum(problem in text for text in left_out["first"]) == 1
    documents = sum(info["splits"][split]["documents"] for split in manifest.SPLITS)
    assert documents == len(small_texts) - 1 + len(small_texts) - 50
    with pytest.raises(DataError):  # without skip_broken it is another data set
        prepare.prepare(broken, workers=1)


def test_records_without_a_text_are_counted_over_all_parts(config, capsys):
    path = pathlib.Path(config.source) / "0.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(x for line in lines for x in (line, '{"text": null}')) + "\n")
    path = prepare.prepare(dataclasses.replace(config, source=str(path), vocab_size=300), workers=1)
    info = loader.open_dataset(path).info
    assert info["nulls"] == len(lines) == sum(s["documents"] for s in info["splits"].values())
    message = f"{len(lines)} records have no text ('text' is null): skipped"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "failure, text",
    [
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (TimeoutError("no answer"), "no answer"),
    ],
)
def test_what_a_disk_or_a_network_fails_to_read_is_not_left_out(config, monkeypatch, failure, text):
    """Reads of a line, or of a Parquet file's header, may succeed later."""
    table = pathlib.Path(config.source) / "3.parquet"
    pq.write_table(pa.table({"text": ["one", "two"]}), table)
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    for module, name, failing in ((json_text, "parse", 40), (pq, "ParquetFile", 2)):
        real, calls = getattr(module, name), []

        def fails(*args, real=real, calls=calls, failing=failing, **kwargs):
            calls.append(1)
            if len(calls) > failing:
                raise failure
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            with pytest.raises(UserError, match=f"could not be read: {text}.*again"):
                prepare.prepare(config, workers=1, skip_broken=True)
    info = loader.open_dataset(prepare.prepare(config, workers=1, skip_broken=True)).info
    assert info["left_out"] == dict(count=0, first=[])


def test_a_folder_that_another_process_writes_to_is_not_removed(config, monkeypatch):
    job = begin_preparation(config)
    job.make(workers=1, share=(0, 9), shown=False)
    folder = job.partial.folder
    (folder / f"work-{partial_dataset._machine()}-{os.getpid()}-living").mkdir()
    (folder / partial_dataset.PLAN).write_text("")
    with pytest.raises(DataError, match="another process is preparing there"):
        prepare.prepare(config, workers=1)


def test_the_command_lists_what_it_left_out(broken, capsys, monkeypatch):
    arguments = broken.command().split()[3:]
    assert command_line.status(prepare.main, [*arguments, "--skip_broken", "--workers=1"]) == 0
    err = capsys.readouterr().err
    assert err.count("skipped: ") == 3
    file = pathlib.Path(broken.source) / "5.jsonl"
    file.write_text("{\n" * 3)
    options = [f"--source={file}", "--workers=1", "--skip_broken"]
    no_text = f"--source = '{file}': has no training text: no readable record has text (--text_key"
    for kind, message in (
        (
            "byte",
            f"the train split is empty once unreadable records are skipped: {file}, line 1 is",
        ),
        ("bpe", no_text),
    ):
        chosen = [*options, f"--tokenizer={kind}"]
        assert command_line.status(prepare.main, [*arguments, *chosen]) == 2
        assert message in capsys.readouterr().err
