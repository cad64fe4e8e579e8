"""Checksums of records: no flipped bit is read as data."""

import json

import pytest

from kvjax.foundation import json_text
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
            found = json_text.parse(broken)
            found = json_text.without_checksum(found) if isinstance(found, dict) else None
            assert json.dumps(found) == json.dumps(RECORD), broken
        except ValueError:
            refused += 1
    assert refused > 8 * len(line) - 20


def test_records_without_a_checksum_are_read_as_they_are():
    for record in ({}, {"step": 1}, RECORD, {"crc": 5}):
        assert json_text.without_checksum(record) == record
    for record in ({"crc32": 5}, {"crc32": 5, "step": 1}, {"crc32": None}):
        with pytest.raises(ValueError, match="its checksum is not that"):
            json_text.without_checksum(record)
