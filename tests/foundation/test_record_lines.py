"""Files of records: lines are sorted; several processes may replace lines, each atomically."""

from concurrent import futures
import json
import math
import multiprocessing
import os

import pytest

from experiments.record import RESULTS
from experiments.tables import provenance_table
from kvjax.foundation import record_lines
from kvjax.foundation.errors import UserError


def test_one_line_changes(tmp_path):
    file = tmp_path / "new" / "table.jsonl"
    assert record_lines.read(file) == {} and record_lines.find(file, "a") is None
    records = {'b "x", é': {"n": 1, "of": [0.1, None]}, "a": {}, "a/c": {"n": math.inf}}
    for name, record in records.items():
        record_lines.put(file, name, record)
    before = file.read_text().splitlines()
    assert [json.loads(line)["name"] for line in before] == sorted(records)
    assert record_lines.read(file) == records
    assert all(record_lines.find(file, name) == record for name, record in records.items())
    record_lines.put(file, "a/c", {"n": 2})
    after = file.read_text().splitlines()
    assert [i for i, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1] == [1]
    record_lines.put(file, "a/c", None)
    assert file.read_text().splitlines() == [before[0], before[2]]


def test_a_failed_write_leaves_the_file(tmp_path, monkeypatch):
    file = tmp_path / "table.jsonl"
    record_lines.put(file, "a", {"n": 1})
    monkeypatch.setattr(os, "replace", _fail)
    with pytest.raises(UserError, match=r"--save: .*Nothing is lost: .*table\.jsonl"):
        record_lines.put(file, "a", {"n": 2})
    assert record_lines.read(file) == {"a": {"n": 1}}


def _fail(*_, **__):
    raise OSError("disk full")


def test_several_writers_lose_nothing(tmp_path):
    file = tmp_path / "table.jsonl"
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(3, context) as pool:
        list(pool.map(_put_many, [file] * 3, range(3)))
    assert record_lines.read(file) == {f"{w}-{i}": {"n": i} for w in range(3) for i in range(20)}


def _put_many(file, writer):
    for i in range(20):
        record_lines.put(file, f"{writer}-{i}", {"n": i})


def test_a_line_that_is_no_record_is_named(tmp_path):
    file = tmp_path / "table.jsonl"
    file.write_text('{"name": "a"}\n<<<<<<< ours\n')
    with pytest.raises(UserError, match=r"table\.jsonl, line 2: "):
        record_lines.read(file)


def test_saved_tables_are_sorted_and_name_their_makers():
    made_by = provenance_table._results()
    for name, count in dict(aot=133, conversion=181).items():
        file = RESULTS / f"{name}.jsonl"
        records = record_lines.read(file)
        assert list(records) == sorted(records) and len(records) >= count
        assert all(made_by[f"{name}/{key}"] == record["made_by"] for key, record in records.items())
