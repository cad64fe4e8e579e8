"""Longer rows: cells, evaluated positions, differences at equal row length."""

import math
import pathlib

import numpy as np
import pytest

from experiments.tasks import positions
from kvjax.model.loss import token_losses
from kvjax.workdir import trained


@pytest.mark.slow
def test_bits_by_position_are_means_of_losses(workdir, monkeypatch):
    for name, value in dict(EDGES=(0, 8, 24), LENGTH=24, ROWS=4, BATCH=2).items():
        monkeypatch.setattr(positions, name, value)
    first, second = positions.by_position(pathlib.Path(workdir))["by_position"]
    loaded = trained.load(workdir)
    rows, bytes_per_token = positions.rows_of(loaded.tokenizer, 4, 24)
    assert rows.shape == (4, 25)
    nats = np.asarray(token_losses(loaded.model, rows[:, :-1], rows[:, 1:], compute=loaded.compute))
    bits = nats / math.log(2) / bytes_per_token
    assert first == pytest.approx(bits[:, :8].mean(), rel=1e-4)
    assert second == pytest.approx(bits[:, 8:].mean(), rel=1e-4)
