"""A workdir of a small model."""

import pytest

from tests.convert import workdirs


@pytest.fixture
def small(tmp_path):
    """The workdir of an LRKV model."""
    block, mechanism, _ = workdirs.MODELS["lrkv"]
    return workdirs.write(tmp_path / "small", workdirs.config(block, mechanism))
