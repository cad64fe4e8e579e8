"""The small model that is trained on meshes."""

import pytest

from tests.distributed import small_step


@pytest.fixture
def config(make_mechanism):
    return small_step.model(make_mechanism("lrkv", qk_norm="rms_gain"))
