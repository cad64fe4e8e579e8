"""A folder of results that is empty."""

import pytest

from experiments import record


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path
