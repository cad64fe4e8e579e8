"""Computes effective ranks of spectra."""

import numpy as np

SHARES = (0.8, 0.9, 0.95, 0.99)


def effective_rank(energy: np.ndarray) -> np.ndarray:
    """Returns exp of the entropy of each spectrum (Roy and Vetterli 2007).

    A spectrum with one direction has rank 1, with R equal directions rank R, and a zero one rank 0.
    LRKV uses this definition (arXiv 2601.11471, appendix C.1).

    Args:
      energy: [..., R] eigenvalues of a Gram matrix, or squared singular values; non-negative up to
        rounding.
    """
    share = fractions(energy)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.where(share.sum(axis=-1) > 0, np.exp(-(share * logs).sum(axis=-1)), 0.0)


def fractions(energy: np.ndarray) -> np.ndarray:
    """Returns [..., R] values over their sum; zeros for a zero spectrum."""
    energy = np.maximum(np.asarray(energy, np.float64), 0.0)
    total = energy.sum(axis=-1, keepdims=True)
    return np.divide(energy, total, out=np.zeros_like(energy), where=total > 0)


def cumulative(energy: np.ndarray) -> np.ndarray:
    """Returns [..., R] shares of the sum that the 1, 2, ... R largest values have."""
    descending = -np.sort(-fractions(energy), axis=-1)
    return np.cumsum(descending, axis=-1)


def energy_rank(energy: np.ndarray, share: float) -> np.ndarray:
    """Returns [...] numbers of largest values that have at least a share of a spectrum's sum.

    Logit spectra (arXiv 2604.04384), table 2, calls this number the effective rank.
    """
    held = cumulative(energy)
    enough = held >= share * (1 - 1e-12)  # rounding may keep the sum below a share of 1
    return np.where(held[..., -1] > 0, enough.argmax(axis=-1) + 1, 0)
