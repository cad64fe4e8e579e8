"""What all tests of the profiler share."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def what_others_left_is_not_collected():
    """The profiler collects garbage between shapes: over what all tests left, a second each."""
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as at the start of the session
