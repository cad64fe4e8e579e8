"""Checksums of records: no flipped bit is read as data."""

import dataclasses
import json
import math

from etils import epath
import numpy as np
import pytest

from kvjax.foundation import json_text
from kvjax.foundation.errors import UserError
from tests import damage

RECORD = {
    "step": 3,
    "loss": 1e-05,
    "said": 'é "J" \\',
    "parts": [1.5, None, True],
    "n": {"a": -0.0},
}


def test_a_flipped_bit_is_refused_or_harmless():
    line = json.dumps(json_text.with_checksum(RECORD)).encode()
    assert json_text.without_checksum(json_text.parse(line)) == RECORD
    refused = 0
    for broken in damage.flipped(line):
        try:
            record = json_text.parse(broken)
            record = json_text.without_checksum(record) if isinstance(record, dict) else None
            assert json.dumps(record) == json.dumps(RECORD), broken
        except ValueError:
            refused += 1
    assert refused > 8 * len(line) - 20


def test_bad_json(tmp_path):
    deep, path = b"[" * 200_000, epath.Path(tmp_path) / "x.json"
    for parse in (json_text.parse, json_text.parse_strictly):
        with pytest.raises(ValueError, match="^nested too deeply$"):
            parse(deep)
    json_text.check_once(deep, "a")
    record = []
    for _ in range(5_000):
        record = [record]
    with pytest.raises(ValueError, match="^nested too deeply$"):
        json_text.with_checksum(dict(a=record))
    for text, message in (
        (b'{"a": NaN}', "^NaN is not a JSON number$"),
        (b'{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', "^the key 'c' occurs twice$"),
        (b'{"a": "\\ud800"}', "^has a lone surrogate"),
    ):
        assert json_text.parse(text) is not None
        with pytest.raises(ValueError, match=message):
            json_text.parse_strictly(text)
    assert json_text.parse_strictly(b'{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}
    for content, message in (
        (None, "is missing: mend it"),
        ("folder", "cannot be read: Is a directory"),
        (b"{", r"is not JSON \(.*\): mend it"),
        (b"[]", "is not a JSON object: mend it"),
        (b'{"a": 1, "crc32": 5}', r"is damaged \(its checksum does not match .*\): mend it"),
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content:
            path.mkdir()
        with pytest.raises(UserError, match=f"^{path} {message}$"):
            json_text.read_record(path, "mend it")
        if content == "folder":
            path.rmdir()
    path.write_text(json.dumps(json_text.with_checksum(RECORD)))
    assert json_text.read_record(path, "") == RECORD


def test_plain_data():
    @dataclasses.dataclass
    class Point:
        x: np.ndarray
        y: float = math.inf

    data = {1: np.float32(0.5), "a": (Point(np.array([1, 2])), [math.nan, True, None, "s"])}
    expected = {"1": 0.5, "a": [{"x": [1, 2], "y": None}, [None, True, None, "s"]]}
    assert json.dumps(json_text.plain(data)) == json.dumps(expected)


def test_records_without_a_checksum_are_read_as_they_are():
    for record in ({}, {"step": 1}, RECORD, {"crc": 5}):
        assert json_text.without_checksum(record) == record
    for record in ({"crc32": 5}, {"crc32": 5, "step": 1}, {"crc32": None}):
        with pytest.raises(ValueError, match="its checksum does not match"):
            json_text.without_checksum(record)
