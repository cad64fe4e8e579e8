"""Measures how much a layer's heads differ, by inner products of their bilinear forms.

    A_h = W_Q,h W_K,h^T            <A_i, A_j> = tr(A_i^T A_j) = sum of (Q_i^T Q_j) * (K_i^T K_j)

From LRKV (arXiv 2601.11471), section 6.3 and appendix C. A head's form, like its logits, does not
change if its queries and keys are rotated together. The D x D forms are never computed; the sum
runs over the H x H matrices Q_i^T Q_j and K_i^T K_j.

The paper is ambiguous in two places. It normalises inner products before centring in appendix C, as
is done here, but not in section 6.3. And it gives centred ranks as shares of N, although centring
leaves at most N - 1; here they are also given as shares of N - 1.
"""

from collections.abc import Iterator
import dataclasses

import numpy as np

from kvjax.analysis.measures import rotary, spectrum
from kvjax.analysis.measures.heads import Heads
from kvjax.foundation.errors import UserError

PARTS = ("key", "value")
_ROUNDING = 1e-12  # eigenvalues below this share of the trace are rounding errors


@dataclasses.dataclass(frozen=True)
class Diversity:
    """Comparison of a layer's N heads.

    Attributes:
      gram_NN: inner products of the forms.
      similarity_NN: inner products over both forms' norms, -1 to 1.
      uncentred_N: eigenvalues of the similarity matrix, descending.
      centred_N: eigenvalues of the centred similarity matrix, the variances of the forms' principal
        components.
      nothing: heads whose form is zero. Their similarity is 0, even to themselves. Each adds an
        eigenvalue 0 to both spectra and so lowers both ranks.
    """

    gram_NN: np.ndarray
    similarity_NN: np.ndarray
    uncentred_N: np.ndarray
    centred_N: np.ndarray
    nothing: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        return len(self.similarity_NN)

    @property
    def rank(self) -> float:
        """Effective rank without centring, 1 to N (LRKV figure 6)."""
        return float(spectrum.effective_rank(self.uncentred_N))

    @property
    def centred_rank(self) -> float:
        """Effective rank of the centred matrix, at most N - 1; 0 for identical heads (LRKV C.1)."""
        return float(spectrum.effective_rank(self.centred_N))

    @property
    def share(self) -> float:
        """Effective rank without centring, over N."""
        return self.rank / self.num_heads

    @property
    def centred_share(self) -> float:
        """Centred effective rank over N, as in the paper: at most (N - 1)/N."""
        return self.centred_rank / self.num_heads

    @property
    def centred_share_of_possible(self) -> float:
        """Centred effective rank over N - 1."""
        return self.centred_rank / (self.num_heads - 1)

    @property
    def mean_similarity(self) -> float:
        """Mean of the similarity matrix's off-diagonal entries."""
        N = self.num_heads
        return float((self.similarity_NN.sum() - np.trace(self.similarity_NN)) / (N * (N - 1)))

    def components(self, share: float = 0.9) -> int:
        """Returns how many principal components hold a share of the variance (LRKV C.5)."""
        return int(spectrum.energy_rank(self.centred_N, share))


def of_layer(heads: Heads, part: str = "key", *, num_distances: int = 0) -> Diversity:
    """Compares the heads of a layer.

    Args:
      part: "key" compares the forms of queries and keys, as in the paper; "value" compares the
        forms W_V,h W_O,h, which are not in the paper.
      num_distances: 0 ignores positions; n averages inner products over relative positions 0 to
        n - 1, see `FormProducts.mean_gram`. Values are not rotated.

    Raises:
      UserError: the layer has one head.
    """
    plain, rotated = plain_and_rotated(heads, part, num_distances)
    return rotated or plain


def plain_and_rotated(
    heads: Heads, part: str, num_distances: int
) -> tuple[Diversity, Diversity | None]:
    """Returns `of_layer` without positions, and averaged over `num_distances` distances.

    The second is None for values, without RoPE, or if num_distances is 0.
    """
    check(heads.num_heads)
    if part == "value":
        return of_gram(FormProducts(heads.value_DKH, heads.out_NHD.transpose(2, 0, 1)).gram()), None
    products = FormProducts(heads.query_DNH, heads.key_DKH)
    plain = of_gram(products.gram())
    if not num_distances or not len(heads.frequencies_F):
        return plain, None
    rotated = products.mean_gram(heads.rotated, heads.frequencies_F, num_distances)
    return plain, of_gram(rotated)


def check(num_heads: int) -> None:
    """Raises a UserError for fewer than two heads."""
    if num_heads < 2:
        raise UserError(
            f"config.attention.num_heads = {num_heads}: diversity compares the heads of a layer "
            "and needs at least two; choose other reports"
        )


def of_gram(gram_NN: np.ndarray) -> Diversity:
    """Compares N forms, given their inner products."""
    nonzero_N = np.diagonal(gram_NN) > 0
    matrix_NN = similarity(gram_NN)
    block = np.ix_(nonzero_N, nonzero_N)
    spectra = []
    for matrix in (matrix_NN[block], centred(matrix_NN[block])):
        values = np.linalg.eigvalsh(matrix)[::-1]
        values = np.where(values > _ROUNDING * np.trace(matrix_NN), values, 0.0)
        spectra.append(np.concatenate([values, np.zeros(np.sum(~nonzero_N))]))
    nothing = tuple(np.flatnonzero(~nonzero_N).tolist())
    return Diversity(gram_NN, matrix_NN, *spectra, nothing)


def similarity(gram_NN: np.ndarray) -> np.ndarray:
    """Returns [N, N] inner products over the norms of both forms (LRKV eq. 8); 0 if one is zero."""
    norm_N = np.sqrt(np.maximum(np.diagonal(gram_NN), 0))
    inverse_N = np.divide(1.0, norm_N, out=np.zeros_like(norm_N), where=norm_N > 0)
    return gram_NN * inverse_N[:, None] * inverse_N


def centred(gram_NN: np.ndarray) -> np.ndarray:
    """Returns [N, N] inner products of the forms minus their mean (LRKV eq. 9)."""
    if not gram_NN.size:
        return gram_NN
    row_N = gram_NN.mean(axis=1)
    return gram_NN - row_N[:, None] - row_N + gram_NN.mean()


class FormProducts:
    """Inner products between the channels of all heads, for both factors of the heads' forms.

    A form is left_h right_h^T. One factor may have fewer heads, such as KV heads in GQA; each is
    then shared by equally many heads of the other factor.
    """

    def __init__(self, left_DNH: np.ndarray, right_DNH: np.ndarray):
        N = max(left_DNH.shape[1], right_DNH.shape[1])
        self._sides = []
        for w_DKH in (left_DNH, right_DNH):
            D, K, H = w_DKH.shape
            flat_DC = w_DKH.reshape(D, K * H)
            inner_KHKH = (flat_DC.T @ flat_DC).reshape(K, H, K, H)
            self._sides.append((inner_KHKH, np.arange(N) * K // N))

    def gram(self) -> np.ndarray:
        """Returns [N, N] inner products of the forms (LRKV eq. 8)."""
        return np.stack([np.einsum("ajb,ajb->j", *blocks) for blocks in self._blocks()])

    def mean_gram(
        self, rotated: slice, frequencies_F: np.ndarray, num_distances: int
    ) -> np.ndarray:
        """Returns [N, N] inner products under RoPE, averaged over n distances. Not in the paper.

        The form A_h(d) = W_Q,h R(d) W_K,h^T gives the logits of a query d tokens after a key. The
        mean of <A_i(d), A_j(d)> over d = 0 to n - 1 has a closed form in complex channels, where
        R(d) is diagonal with entries e^{i·d·theta_a}: the product of two entries (a, b) of the Gram
        blocks is multiplied by the mean of e^{i·d·(theta_b - theta_a)}.

        Args:
          rotated, frequencies_F: as in `Heads`.
          num_distances: n, at least 1.
        """
        H = self._sides[0][0].shape[-1]
        phase_H = rotary.phases(H, rotated, frequencies_F)
        weight_HH = _mean_rotation(phase_H - phase_H[:, None], num_distances)

        def to_complex(x_HNH):
            return rotary.to_complex_channels(
                rotary.to_complex_channels(x_HNH, rotated, 0).conj(), rotated
            )

        rows = []
        for left_HNH, right_HNH in self._blocks():
            left_HNH = to_complex(left_HNH) * weight_HH[:, None]
            rows.append(np.einsum("ajb,ajb->j", left_HNH, to_complex(right_HNH).conj()).real)
        return np.stack(rows)

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields for each head its [H, N, H] inner products with all heads, for both factors."""
        for i in range(len(self._sides[0][1])):
            yield tuple(inner[of_N[i]][:, of_N] for inner, of_N in self._sides)


def _mean_rotation(angle: np.ndarray, num_distances: int) -> np.ndarray:
    """Returns the mean of e^{i·d·angle} over d = 0 to n - 1."""
    half, sine = angle / 2, np.sin(angle / 2)
    ratio = np.sin(num_distances * half) / (num_distances * np.where(sine == 0, 1.0, sine))
    return np.where(sine == 0, 1.0, ratio * np.exp(1j * (num_distances - 1) * half))
