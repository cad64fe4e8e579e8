"""Measures norms and angles of LRKV's bases and residuals.

    W_k = base_j(k) + residual_k,        residual_k = U_k B_k^T of rank R            # LRKV eq. 1

From LRKV (arXiv 2601.11471), section 4 and figure 8. W_k does not determine its parts: a term that
all residuals of a base contain could be moved to the base. (The paper says so of any matrix, but
residuals must keep rank R.) Everything is therefore measured twice: on the parts as learned, and on
canonical parts, which W_k determines. There, the base is the mean of its heads, and a residual is a
head's difference from that mean, of any rank.

As in `heads`, keys are multiplied by their norm's gain, and biases are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.analysis.measures import heads as heads_lib
from kvjax.attention import GroupedConfig
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import model as model_lib
from kvjax.convert.factors import einsum
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

_SAME = 1e-13  # differences from the mean below this share of a head's norm are rounding errors
_ROUNDING = 1e-10  # singular values below this share of the largest are rounding errors


class BaseAndResiduals(NamedTuple):
    """The keys or values of a layer as J bases and K residuals."""

    base_DJH: np.ndarray
    residual_DKH: np.ndarray
    rank: int  # R of the mechanism, also for canonical residuals of higher rank

    @property
    def base_DKH(self) -> np.ndarray:
        """The base of each head."""
        K, J = self.residual_DKH.shape[1], self.base_DJH.shape[1]
        return np.repeat(self.base_DJH, K // J, axis=1)

    @property
    def total_DKH(self) -> np.ndarray:
        return self.base_DKH + self.residual_DKH

    def canonical(self) -> "BaseAndResiduals":
        """Returns the canonical parts of the same heads."""
        return canonical_parts(self.total_DKH, self.base_DJH.shape[1], self.rank)


def canonical_parts(total_DKH: np.ndarray, bases: int, rank: int) -> BaseAndResiduals:
    """Returns the canonical parts of heads: J means, and the differences from them."""
    D, K, H = total_DKH.shape
    base_DJH = total_DKH.reshape(D, bases, K // bases, H).mean(axis=2)
    residual_DKH = total_DKH - np.repeat(base_DJH, K // bases, axis=1)
    residual_DKH[:, norms(residual_DKH) <= _SAME * norms(total_DKH)] = 0  # all heads are equal
    return BaseAndResiduals(base_DJH, residual_DKH, rank)


def random_like(parts: BaseAndResiduals, seed: int | Sequence[int]) -> BaseAndResiduals:
    """Returns a baseline: independent normal factors, scaled to the norms of these parts."""
    rng = np.random.default_rng(seed)
    D, K, H = parts.residual_DKH.shape
    R = parts.rank
    base_DJH = rng.normal(size=parts.base_DJH.shape)
    residual_DKH = einsum("DKR,KRH->DKH", rng.normal(size=(D, K, R)), rng.normal(size=(K, R, H)))

    def with_norms_of(w, like):
        return w * (norms(like) / norms(w))[:, None]

    return BaseAndResiduals(
        with_norms_of(base_DJH, parts.base_DJH), with_norms_of(residual_DKH, parts.residual_DKH), R
    )


def has_residuals(config: MechanismConfig) -> bool:
    return isinstance(config, GroupedConfig) and config.rank > 0


def of_layer(model: LazyModel, index: int) -> dict[str, BaseAndResiduals]:
    """Returns the parts of a layer's keys ("key") and values ("value", unless values are the keys).

    Raises:
      UserError: weights are not finite.
    """
    weights = model_lib.read_layer(model, index, "attention", "mechanism")
    by_name = read(weights, model.transformer.mechanisms[index])
    for name, parts in by_name.items():
        finite_K = np.isfinite(parts.total_DKH).all(axis=(0, 2))
        if not finite_K.all():
            raise UserError(
                f"layer {index} of {model.name}: weights of {name}s are not finite, "
                f"of heads {np.flatnonzero(~finite_K).tolist()}"
            )
    return by_name


def read(weights: dict, config: GroupedConfig) -> dict[str, BaseAndResiduals]:
    """Returns the parts of a mechanism with residuals, given its weights as a pure dict."""
    by_name = {}
    for name in ("key",) if config.ties_values else ("key", "value"):

        def float64(weight_name):
            return np.asarray(weights[weight_name], np.float64)

        gain = weights.get(f"{name}_norm", {}).get("gain", 1.0)
        residual_DKH = einsum("DKR,KRH->DKH", float64(f"latent_{name}"), float64(f"expand_{name}"))
        by_name[name] = BaseAndResiduals(
            float64(f"base_{name}") * gain, residual_DKH * gain, config.rank
        )
    return by_name


def totals(model: LazyModel, index: int) -> dict[str, np.ndarray]:
    """Returns [D, K, H] keys and values of a layer of any mechanism; see `heads.of_layer`."""
    heads = heads_lib.of_layer(model, index)
    return dict(key=heads.key_DKH, value=heads.value_DKH)


class PartGeometry(NamedTuple):
    """Comparison of a layer's bases with its residuals, as learned or canonical.

    Columns of the [D, H] matrices are directions of the layer's input.

    Attributes:
      base_norm_J, residual_norm_K: Frobenius norms (LRKV figure 8).
      cosine_K: cosine of each residual and its base, as vectors of D·H numbers; nan if one is zero.
        Canonical residuals of a base sum to zero, so their cosines have both signs.
      angles: per head, cosines of the principal angles, descending, between the base's column space
        and the R strongest column directions of the residual.
      overlap_K: mean square of these cosines: the share of the residual's directions inside the
        base's column space; nan without a residual. Random weights give H/D on average as learned,
        and more in canonical form, since the mean contains a part of every residual.
      reads: orthonormal basis [D, R] of the R strongest directions of each residual.
    """

    base_norm_J: np.ndarray
    residual_norm_K: np.ndarray
    cosine_K: np.ndarray
    angles: tuple[np.ndarray, ...]
    overlap_K: np.ndarray
    reads: tuple[np.ndarray, ...]


def part_geometry(parts: BaseAndResiduals) -> PartGeometry:
    """Compares bases with residuals; see `PartGeometry`."""
    bases = directions(parts.base_DJH)
    base_K = np.arange(parts.residual_DKH.shape[1]) * len(bases) // parts.residual_DKH.shape[1]
    residuals = directions(parts.residual_DKH, parts.rank)
    angles = tuple(
        principal_cosines(bases[j], residual) for j, residual in zip(base_K, residuals, strict=True)
    )
    return PartGeometry(
        norms(parts.base_DJH),
        norms(parts.residual_DKH),
        cosines(parts.base_DKH, parts.residual_DKH),
        angles,
        np.array([overlap(cosines_R) for cosines_R in angles]),
        tuple(residuals),
    )


class BestResiduals(NamedTuple):
    """Comparison of learned residuals with the best ones of rank R, truncated SVDs (Eckart-Young).

    Losses are shares of |W_k|², the squared norm of a head. LRKV section 6.3 announces a comparison
    with "the optimal rank-r truncated SVD" and gives no figures.

    Attributes:
      alone_K: loss if the best rank-R matrix replaces W_k, without a base.
      with_mean_K: loss if the mean of the heads, plus the best rank-R residual, replaces W_k.
      overlap_K: share of the learned residual's column directions inside those of the best; nan
        without a residual. For unrelated heads it is R/D on average. For the residual's own heads
        it is far more, even with random factors.
      distance_K: |learned - best| / |best|, Frobenius norms; nan if the best is zero. 0: equal; 1:
        the learned residual is zero; sqrt(2) on average: unrelated residuals of equal norm.
    """

    alone_K: np.ndarray
    with_mean_K: np.ndarray
    overlap_K: np.ndarray
    distance_K: np.ndarray


def best_residuals(
    heads: BaseAndResiduals,
    canonical: PartGeometry,
    learned: BaseAndResiduals,
    reads: Sequence[np.ndarray],
) -> BestResiduals:
    """Compares learned residuals with the best ones for the heads of the same or another model.

    For another model, the overlap is meaningful only if its head k corresponds to head k: one model
    was made from the other, or both started from the same weights.

    Args:
      heads: canonical parts of the heads that the best residuals approximate.
      canonical: geometry of `heads`.
      learned: parts as learned.
      reads: `PartGeometry.reads` of `learned`.
    """
    total_DKH = heads.total_DKH
    energy_K = norms(total_DKH) ** 2
    pairs = zip(canonical.reads, reads, strict=True)
    best_DKH = np.empty_like(total_DKH)
    for k, best_DR in enumerate(canonical.reads):  # Eckart-Young: project to the best directions
        best_DKH[:, k] = best_DR @ (best_DR.T @ heads.residual_DKH[:, k])
    return BestResiduals(
        _ratios(lost(total_DKH, heads.rank), energy_K),
        _ratios(lost(heads.residual_DKH, heads.rank), energy_K),
        np.array([overlap(principal_cosines(best, own)) for best, own in pairs]),
        _ratios(norms(learned.residual_DKH - best_DKH), norms(best_DKH)),
    )


def norms(w_DKH: np.ndarray) -> np.ndarray:
    """Returns [K] Frobenius norms."""
    return np.sqrt(np.sum(w_DKH**2, axis=(0, 2)))


def cosines(left_DKH: np.ndarray, right_DKH: np.ndarray) -> np.ndarray:
    """Returns [K] cosines of the heads' matrices as vectors of D·H numbers; nan if one is zero."""
    size_K = norms(left_DKH) * norms(right_DKH)
    return _ratios(np.sum(left_DKH * right_DKH, axis=(0, 2)), size_K)


def _ratios(numerator_K: np.ndarray, denominator_K: np.ndarray) -> np.ndarray:
    """Returns [K] ratios; nan where the denominator is 0."""
    nan_K = np.full(len(denominator_K), np.nan)
    return np.divide(numerator_K, denominator_K, out=nan_K, where=denominator_K > 0)


def directions(w_DKH: np.ndarray, rank: int | None = None) -> list[np.ndarray]:
    """Returns per head an orthonormal basis [D, R] of its column space, or of its R strongest part.

    Directions at the level of rounding are left out, so a head of lower rank has fewer.
    """
    bases = []
    for w_DH in w_DKH.transpose(1, 0, 2):
        left, values, _ = np.linalg.svd(w_DH, full_matrices=False)
        full_rank = np.sum(values > _ROUNDING * values[0])
        bases.append(left[:, : full_rank if rank is None else min(full_rank, rank)])
    return bases


def principal_cosines(left_DA: np.ndarray, right_DB: np.ndarray) -> np.ndarray:
    """Returns [B] cosines of the principal angles between two subspaces, descending.

    The subspaces are given by orthonormal bases. If the left one has fewer dimensions than the
    right one, zeros are appended (Björck and Golub 1973).
    """
    values = np.linalg.svd(left_DA.T @ right_DB, compute_uv=False) if left_DA.size else np.zeros(0)
    cosines_B = np.zeros(right_DB.shape[1])
    cosines_B[: len(values)] = np.minimum(values, 1.0)
    return cosines_B


def overlap(cosines_B: np.ndarray) -> float:
    """Returns the mean square of cosines; nan if there are none."""
    return float(np.mean(cosines_B**2)) if cosines_B.size else np.nan


def lost(w_DKH: np.ndarray, rank: int) -> np.ndarray:
    """Returns [K] squared Frobenius errors of the best rank-R approximation (Eckart-Young)."""
    w_KDH = w_DKH.transpose(1, 0, 2)
    gram_KHH = w_KDH.transpose(0, 2, 1) @ w_KDH
    energies_KH = np.maximum(np.linalg.eigvalsh(gram_KHH), 0.0)  # ascending
    return energies_KH[:, : max(0, energies_KH.shape[1] - rank)].sum(axis=1)
