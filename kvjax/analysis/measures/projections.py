"""Measures the similarity and effective ranks of a layer's query, key and value projections.

Projection sharing (arXiv 2606.04032), section 4, argues from cosines of W_Q, W_K and W_V that keys
can serve as values. But cosines change if a head's queries and keys are rotated together, or its
values and outputs, which does not change the model. `overlap` does not change.
"""

from collections.abc import Mapping
import itertools

import numpy as np

from kvjax.analysis.measures import spectrum
from kvjax.analysis.measures.heads import Heads

NAMES = ("query", "key", "value")
PAIRS = tuple(itertools.combinations(NAMES, 2))


def of_heads(heads: Heads) -> dict[str, np.ndarray]:
    """Returns the projections by name: [D, N, H] queries, [D, K, H] keys and values."""
    return dict(query=heads.query_DNH, key=heads.key_DKH, value=heads.value_DKH)


def cosine(left_DNH: np.ndarray, right_DNH: np.ndarray) -> float | None:
    """Returns the cosine of two projections as vectors; None if head widths differ or one is zero.

    If one has fewer heads, each of them is repeated for its query heads. Independent random
    matrices have cosines of about ±1/sqrt(D·N·H).
    """
    if left_DNH.shape[-1] != right_DNH.shape[-1]:
        return None
    N = max(left_DNH.shape[1], right_DNH.shape[1])
    left, right = (np.repeat(w, N // w.shape[1], axis=1).ravel() for w in (left_DNH, right_DNH))
    norms = np.linalg.norm(left) * np.linalg.norm(right)
    return float(left @ right / norms) if norms else None


class ProjectionProducts:
    """Measures of the named projections W_a, computed from products W_a^T W_b."""

    def __init__(self, projections: Mapping[str, np.ndarray]):
        self._flat = {name: w.reshape(len(w), -1) for name, w in projections.items()}
        self._energy = {name: _energies(w) for name, w in self._flat.items()}

    def overlap(self, one: str, other: str) -> float | None:
        """Returns |W_a^T W_b|^2 / (|W_a^T W_a| |W_b^T W_b|), 0 to 1; None for a zero matrix.

        This is the cosine of W_a W_a^T and W_b W_b^T (linear CKA without centring, Kornblith et al.
        2019). It is 1 if both read the same input directions with the same strength. It does not
        change if a head's channels are rotated, or if KV heads are repeated for their query heads.
        """
        norms = np.prod([np.linalg.norm(self._energy[name]) for name in (one, other)])
        inner = np.linalg.norm(self._flat[one].T @ self._flat[other]) ** 2
        return float(inner / norms) if norms else None

    def overlap_by_chance(self, one: str, other: str) -> float | None:
        """Returns the expected `overlap` if the input directions of one projection were random.

        With A = W_a W_a^T and B = W_b W_b^T, the mean of <A, U B U^T> over random rotations U is
        tr A tr B / D. The overlap of two random square matrices is about 1/2.
        """
        energies = [self._energy[name] for name in (one, other)]
        norms = len(self._flat[one]) * np.prod([np.linalg.norm(energy) for energy in energies])
        return float(np.prod([energy.sum() for energy in energies]) / norms) if norms else None

    def effective_ranks(self, name: str) -> tuple[float, float]:
        """Returns the effective rank by singular values, and that by their squares.

        The paper does not say which of the two it uses.
        """
        energy = self._energy[name]
        ranks = (spectrum.effective_rank(values) for values in (np.sqrt(energy), energy))
        return tuple(map(float, ranks))

    def possible_rank(self, name: str) -> int:
        """Returns the largest rank of a matrix of this shape."""
        return min(self._flat[name].shape)


def effective_ranks_by_chance(rows: int, columns: int) -> tuple[float, float]:
    """Returns the `effective_ranks` of a large random matrix, by the Marchenko-Pastur law."""
    few, many = sorted((rows, columns))
    low, high = 1 - np.sqrt(few / many), 1 + np.sqrt(few / many)
    angle = (np.arange(4096) + 0.5) * np.pi / 4096
    s = np.sqrt((low**2 + high**2) / 2 + (high**2 - low**2) / 2 * np.cos(angle))
    density = np.sin(angle) ** 2 / s**2  # the law's density of s^2, times |ds^2 / d angle|
    density /= density.sum()
    ranks = []
    for values in (s, s**2):
        mean = density @ values
        ranks.append(few * np.exp(np.log(mean) - density @ (values * np.log(values)) / mean))
    return float(ranks[0]), float(ranks[1])


def _energies(w: np.ndarray) -> np.ndarray:
    """Returns the squared singular values of a matrix, from the smaller Gram matrix."""
    rows, columns = w.shape
    gram = w.T @ w if columns <= rows else w @ w.T
    return np.maximum(np.linalg.eigvalsh(gram), 0.0)
