"""How alike the query, key and value projections of a layer are, and how many directions each has.

Projection sharing (arXiv 2606.04032), section 4, explains by this why keys may serve as values. It
gives cosines of W_Q, W_K and W_V, which rotations of a head's channels change though they do not
change the model: queries and keys may be turned together, values and outputs together, so the
cosine of W_K and W_V says something of one parametrisation only. `overlap` is free of that.
"""

from collections.abc import Mapping
import itertools

import numpy as np

from kvjax.analysis.measures import spectrum
from kvjax.analysis.measures.heads import Heads

NAMES = ("query", "key", "value")
PAIRS = tuple(itertools.combinations(NAMES, 2))


def of_heads(heads: Heads) -> dict[str, np.ndarray]:
    """The projections by name: [D, N, H] queries, [D, K, H] keys and values."""
    return dict(query=heads.query_DNH, key=heads.key_DKH, value=heads.value_DKH)


def cosine(left_DNH: np.ndarray, right_DNH: np.ndarray) -> float | None:
    """Cosine of two whole matrices [D, N·H]; None where heads have other channels, or are zero.

    Where one side has fewer heads, each stands for all query heads that read it. Independent
    random matrices have a cosine of about ±1/sqrt(D·N·H).
    """
    if left_DNH.shape[-1] != right_DNH.shape[-1]:
        return None
    N = max(left_DNH.shape[1], right_DNH.shape[1])
    left, right = (np.repeat(w, N // w.shape[1], axis=1).ravel() for w in (left_DNH, right_DNH))
    size = np.linalg.norm(left) * np.linalg.norm(right)
    return float(left @ right / size) if size else None


class ProjectionProducts:
    """The projections' products with each other, W_a^T W_b, of which the measures are made."""

    def __init__(self, projections: Mapping[str, np.ndarray]):
        self._flat = {name: w.reshape(len(w), -1) for name, w in projections.items()}
        self._energy = {name: _energies(w_DC) for name, w_DC in self._flat.items()}

    def overlap(self, one: str, other: str) -> float | None:
        """|W_a^T W_b|^2 / (|W_a^T W_a| |W_b^T W_b|), 0 to 1, None with a matrix of zeros.

        The cosine of W_a W_a^T and W_b W_b^T (linear CKA without centring, Kornblith et al.
        2019): whether both read the same directions of the input with the same strength. Neither
        rotations of a head's channels nor a count of query heads for each KV head change it.
        """
        size = np.prod([np.linalg.norm(self._energy[name]) for name in (one, other)])
        inner = np.linalg.norm(self._flat[one].T @ self._flat[other]) ** 2
        return float(inner / size) if size else None

    def overlap_by_chance(self, one: str, other: str) -> float | None:
        """What `overlap` is on average if one's directions of the input are drawn at random.

        With both spectra as they are: E <A, U B U^T> = tr A tr B / D over random rotations U. It
        is not near zero: half, for random square matrices.
        """
        energies = [self._energy[name] for name in (one, other)]
        size = len(self._flat[one]) * np.prod([np.linalg.norm(energy) for energy in energies])
        return float(np.prod([energy.sum() for energy in energies]) / size) if size else None

    def effective_ranks(self, name: str) -> tuple[float, float]:
        """Effective rank by singular values and by their squares.

        The paper does not say which of both it means.
        """
        energy = self._energy[name]
        found = (spectrum.effective_rank(values) for values in (np.sqrt(energy), energy))
        return tuple(map(float, found))

    def possible_rank(self, name: str) -> int:
        """The largest rank that a matrix of this shape has."""
        return min(self._flat[name].shape)


def effective_ranks_by_chance(rows: int, columns: int) -> tuple[float, float]:
    """`Products.effective_ranks` of a large matrix of independent normal numbers.

    From the law of Marchenko and Pastur for its singular values.
    """
    few, many = sorted((rows, columns))
    low, high = 1 - np.sqrt(few / many), 1 + np.sqrt(few / many)
    angle = (np.arange(4096) + 0.5) * np.pi / 4096
    s = np.sqrt((low**2 + high**2) / 2 + (high**2 - low**2) / 2 * np.cos(angle))
    density = np.sin(angle) ** 2 / s**2  # of s^2 over the angle
    density /= density.sum()
    found = []
    for values in (s, s**2):
        mean = density @ values
        found.append(few * np.exp(np.log(mean) - density @ (values * np.log(values)) / mean))
    return float(found[0]), float(found[1])


def _energies(w_DC: np.ndarray) -> np.ndarray:
    """Squares of the singular values, from the smaller Gram matrix."""
    D, C = w_DC.shape
    gram = w_DC.T @ w_DC if C <= D else w_DC @ w_DC.T
    return np.maximum(np.linalg.eigvalsh(gram), 0.0)
