"""Centred kernel alignment, against the estimator's definition."""

import numpy as np
import pytest

from kvjax.analysis.measures import cka

T = 20


def _features(*widths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(T, D)) + rng.normal(size=D) for D in widths]


def _hsic(x_TD, y_TD):
    """Song et al. 2012, equation 5, on plain Gram matrices without their diagonals."""
    K, L = (x @ x.T for x in (x_TD, y_TD))
    np.fill_diagonal(K, 0)
    np.fill_diagonal(L, 0)
    ones = np.ones(T)
    whole = (ones @ K @ ones) * (ones @ L @ ones) / ((T - 1) * (T - 2))
    return (np.trace(K @ L) + whole - 2 / (T - 2) * ones @ K @ L @ ones) / (T * (T - 3))


@pytest.mark.parametrize("widths", [(3, 5), (3, 50), (40, 60)])
def test_it_is_the_estimator(widths):
    """Covers Gram matrices of tokens and of channels."""
    x_TD, y_TD = _features(*widths)
    y_TD = y_TD + x_TD @ np.random.default_rng(9).normal(size=(widths[0], widths[1]))
    found_FF = cka.linear_cka([x_TD, y_TD])
    expected = _hsic(x_TD, y_TD) / np.sqrt(_hsic(x_TD, x_TD) * _hsic(y_TD, y_TD))
    assert found_FF[0, 1] == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(np.diagonal(found_FF), 1)
    np.testing.assert_allclose(found_FF, found_FF.T, rtol=1e-12)


def test_constant_features_have_no_cka():
    x_TD, same_TD = _features(4)[0], np.full((T, 4), 0.1)
    found_FF = cka.linear_cka([x_TD, same_TD])
    assert found_FF[0, 0] == pytest.approx(1) and np.isnan(found_FF[[0, 1, 1], [1, 0, 1]]).all()
