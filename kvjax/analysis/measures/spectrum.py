"""Effective ranks of spectra."""

import numpy as np

SHARES = (0.8, 0.9, 0.95, 0.99)


def effective_rank(energy: np.ndarray) -> np.ndarray:
    """Returns exp of the entropy of each [..., R] spectrum: 1 for one direction, R for R equal
    ones.

    Roy and Vetterli 2007, as in LRKV (arXiv 2601.11471, appendix C.1). A zero spectrum has rank 0.

    Args:
      energy: eigenvalues of a Gram matrix, or squared singular values; non-negative up to rounding.
    """
    share = fractions(energy)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.where(share.sum(axis=-1) > 0, np.exp(-(share * logs).sum(axis=-1)), 0.0)


def fractions(energy: np.ndarray) -> np.ndarray:
    """Returns [..., R] shares of the total; zeros for a zero spectrum."""
    energy = np.maximum(np.asarray(energy, np.float64), 0.0)
    total = energy.sum(axis=-1, keepdims=True)
    return np.divide(energy, total, out=np.zeros_like(energy), where=total > 0)


def cumulative(energy: np.ndarray) -> np.ndarray:
    """Returns [..., R] shares of the total in the 1, 2, ... largest values."""
    descending = -np.sort(-fractions(energy), axis=-1)
    return np.cumsum(descending, axis=-1)


def energy_rank(energy: np.ndarray, share: float) -> np.ndarray:
    """Returns [...], how many of the largest values of each [..., R] spectrum sum to a share.

    Logit spectra (arXiv 2604.04384), table 2, calls it the effective rank.
    """
    held = cumulative(energy)
    enough = held >= share * (1 - 1e-12)  # rounding may keep the sum below a share of 1
    return np.where(held[..., -1] > 0, enough.argmax(axis=-1) + 1, 0)
