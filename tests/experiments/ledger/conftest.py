"""An empty folder of results, and a source of made-up differences."""

import pytest

from experiments import record
from experiments.ledger import judge
from kvjax.foundation.intervals import Estimate


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def make_difference(monkeypatch):
    """Returns a difference as rules name it."""
    monkeypatch.setitem(judge.SOURCES, "synthetic", lambda m, half, n: (Estimate(m, half), n))
    return lambda mean, half, seeds=3: {"synthetic": (mean, half, seeds)}
