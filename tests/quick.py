"""Which cases of a test `make test` runs: enough to see its promise broken; the rest are slow."""

from collections.abc import Iterable

import pytest

# One mechanism for each way of reading a cache: plain, residual, tied, latent, latent rebuilt.
READERS = ("gqa", "lrkv_gqa", "lrkv_kv_tied", "mla", "mla_paper")


def only(quick: Iterable, among: Iterable) -> list:
    """All cases for `pytest.mark.parametrize`, slow but for those named.

    Args:
      quick: cases of `among`.
      among: all cases; one of several arguments is a tuple.
    """
    quick, among = list(quick), list(among)
    assert quick and all(case in among for case in quick), (quick, among)
    return [case if case in quick else _slow(case) for case in among]


def every(step: int, among: Iterable, first: int = 0) -> list:
    """As `only`, of one case in so many."""
    return [case if i % step == first else _slow(case) for i, case in enumerate(among)]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
