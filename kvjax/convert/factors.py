"""Closed-form low-rank factors of stacks of matrices, in float64.

The error of W' is E|x (W - W')|^2 over inputs x with second moment C: the squared Frobenius norm if
C is the identity. Everything is computed from Gram matrices of the outputs, W^T C W.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import numpy as np
import scipy.linalg

from kvjax.foundation import runtime

SWEEPS = 100  # maximum per rank
TOLERANCE = 1e-5  # the last sweep lowers the error by less than this share of the energy
_RIDGE = 1e-9  # relative to the mean energy of an input channel
_SMALL = 2048  # rows below which BLAS's threads mostly wait for each other

einsum = functools.partial(np.einsum, optimize=True)  # by BLAS


def few_threads(rows: int):
    """Returns a context in which BLAS uses one thread if matrices have few rows.

    On two cores shared with another process, 30 layers of 576 channels took 42.6 s with two
    threads and 1.0 s with one.
    """
    return runtime.blas_threads(1 if rows < _SMALL else None)


class Factors(NamedTuple):
    """W_k = latent_j(k) expand_k."""

    latent_EJR: np.ndarray
    expand_KRH: np.ndarray
    error: float  # share of the energy that is lost


def energies(w_EKH: np.ndarray, moment_EE: np.ndarray, *, latents: int) -> np.ndarray:
    """Returns descending energies [J, K/J·H] of the principal directions of each latent's heads."""
    return np.stack([values[::-1] for values, _ in _spectra(w_EKH, moment_EE, latents)])


def low_rank(w_EKH: np.ndarray, rank: int, moment_EE: np.ndarray, *, latents: int) -> Factors:
    """Returns the optimal factors of rank R (Eckart-Young), one latent for every K/J heads.

    Args:
      rank: R, at most K/J·H.
      latents: J.
    """
    E, _, H = w_EKH.shape
    w_EJC = w_EKH.reshape(E, latents, -1)
    latent, expand, kept, total = [], [], 0.0, 0.0
    for j, (values_C, vectors_CC) in enumerate(_spectra(w_EKH, moment_EE, latents)):
        best_CR = vectors_CC[:, ::-1][:, :rank]
        latent.append(w_EJC[:, j] @ best_CR)
        expand.append(best_CR.T.reshape(rank, -1, H).transpose(1, 0, 2))
        kept, total = kept + values_C[::-1][:rank].sum(), total + values_C.sum()
    error = max(0.0, 1 - kept / total) if total else 0.0
    return Factors(np.stack(latent, axis=1), np.concatenate(expand), error)


def _spectra(w_EKH: np.ndarray, moment_EE: np.ndarray, latents: int):
    """Yields per latent the eigenvalues, ascending, and eigenvectors of its heads' Gram matrix."""
    E = w_EKH.shape[0]
    w_EJC = w_EKH.reshape(E, latents, -1)
    for j in range(latents):
        weighted = moment_EE @ w_EJC[:, j]
        values, vectors = np.linalg.eigh(w_EJC[:, j].T @ weighted)
        yield np.maximum(values, 0), vectors


def balance_scales(
    left: np.ndarray, right: np.ndarray, axes: Sequence[tuple[int, ...]]
) -> np.ndarray:
    """Returns a scale s per channel that makes the RMS of `left * s` and `right / s` equal.

    Adam and Muon take steps of one size for all weights, so a factor of large numbers would hardly
    change in training. Channels that are zero in either factor keep their scale.

    Args:
      axes: the axes of each factor to average over.
    """
    left_rms, right_rms = (
        np.sqrt(np.mean(x**2, axis=over)) for x, over in zip((left, right), axes, strict=True)
    )
    used = (left_rms > 0) & (right_rms > 0)
    return np.sqrt(np.divide(right_rms, left_rms, out=np.ones_like(left_rms), where=used))


class BaseAndResidual(NamedTuple):
    """W_k Rot_k = base_j(k) + latent_k expand_k (LRKV eq. 2), with a rotation Rot_k per head."""

    base_EJH: np.ndarray
    latent_EKR: np.ndarray
    expand_KRH: np.ndarray
    rotation_KHH: np.ndarray
    error: float  # share of the energy that is lost


def base_and_residual(
    w_EKH: np.ndarray,
    rank: int,
    moment_EE: np.ndarray,
    *,
    bases: int,
    rotations: str,
    step: int = 0,
    sweeps: int = SWEEPS,
    tolerance: float = TOLERANCE,
) -> BaseAndResidual:
    """Fits shared bases and residuals of rank R by alternating closed forms.

    Each sweep updates in turn every head's rotation (Procrustes), its residual (Eckart-Young) and
    the bases (a mean); no update raises the error. The fit starts at rank 0: heads rotated towards
    their mean.

    Args:
      bases: J; head k uses base k·J // K.
      rotations: rotations that the fit may choose: "none", "pairs" (within channel pairs i and
        i + H/2, which commute with RoPE) or "all".
      step: visit the multiples of `step` on the way to R; 0: start R directly from rank 0.
      sweeps: maximum per rank.
      tolerance: stop when a sweep lowers the error by less than this share of the energy.
    """
    with runtime.blas_threads(1):  # many small products
        fit = _AlternatingFit(w_EKH, moment_EE, bases, rotations)
        steps = range(step, rank, step) if step else ()
        for fit_rank in (0, *steps, rank) if rank else (0,):
            fit.improve(fit_rank, sweeps, tolerance)
        return fit.result(rank)


def losses_by_rank(
    w_EKH: np.ndarray, ranks: Sequence[int], moment_EE: np.ndarray, *, bases: int, rotations: str
) -> list[float]:
    """Returns the share of the energy that `base_and_residual` loses at each of these ranks.

    Args:
      ranks: multiples of `step`, ascending; the last may be any rank.
    """
    with runtime.blas_threads(1):
        fit, losses = _AlternatingFit(w_EKH, moment_EE, bases, rotations), []
        fit.improve(0, SWEEPS, TOLERANCE)
        for rank in ranks:
            fit.improve(rank, SWEEPS, TOLERANCE)
            losses.append(fit.lost(rank))
        return losses


class _AlternatingFit:
    """State of `base_and_residual`; inputs are whitened, so inner products need no moment."""

    def __init__(self, w_EKH: np.ndarray, moment_EE: np.ndarray, bases: int, rotations: str):
        _, K, H = w_EKH.shape
        self.rotations, self.of_base = rotations, np.arange(K) * bases // K
        self.root_EE = root(moment_EE)
        # For x = L z with white z, the mean of |x w|^2 is |L^T w|^2: the fit uses L^T w.
        self.w, self.basis_EP = _column_span(einsum("EF,FKH->KEH", self.root_EE, w_EKH))
        self.total = np.sum(self.w**2)
        # Initial bases: the first head of each; the others are rotated towards it.
        self.base = self.w[np.searchsorted(self.of_base, np.arange(bases))]
        self.residual = np.zeros_like(self.w)
        self.rotation = np.broadcast_to(np.eye(H), (K, H, H)).copy()

    def improve(self, rank: int, sweeps: int, tolerance: float) -> None:
        """Sweeps with residuals of this rank until the error settles."""
        error = np.inf
        for _ in range(sweeps):
            self.rotation = _procrustes(self.w, self._head_bases() + self.residual, self.rotations)
            rotated_KEH = self.w @ self.rotation
            if rank:
                gap = rotated_KEH - self._head_bases()
                expand = _best_directions(gap, rank)
                self.residual = gap @ expand.transpose(0, 2, 1) @ expand
            without_residual = rotated_KEH - self.residual
            bases = range(len(self.base))
            self.base = np.stack([without_residual[self.of_base == j].mean(axis=0) for j in bases])
            previous, error = error, np.sum((without_residual - self._head_bases()) ** 2)
            if previous - error < tolerance * self.total:
                break

    def lost(self, rank: int) -> float:
        """Returns the lost share of the energy, with optimal residuals for the present bases."""
        return self._factors(rank)[-1]

    def result(self, rank: int) -> BaseAndResidual:
        """Returns the fit in terms of the original, unwhitened weights."""
        latent, expand, lost = self._factors(rank)

        def unwhitened(x):
            return scipy.linalg.solve_triangular(self.root_EE, self.basis_EP @ x)

        base_EJH = np.stack([unwhitened(x) for x in self.base], axis=1)
        latent_EKR = np.stack([unwhitened(x) for x in latent], axis=1)
        return BaseAndResidual(base_EJH, latent_EKR, expand, self.rotation, lost)

    def _head_bases(self) -> np.ndarray:
        """Returns [K, E, H], the base of every head."""
        return self.base[self.of_base]

    def _factors(self, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
        gap = self.w @ self.rotation - self._head_bases()
        expand = _best_directions(gap, rank)
        latent = gap @ expand.transpose(0, 2, 1)
        lost = np.sum((gap - latent @ expand) ** 2)
        return latent, expand, float(lost / self.total) if self.total else 0.0


def root(moment_EE: np.ndarray) -> np.ndarray:
    """Returns a full-rank square root L^T of the moment L L^T.

    A singular moment gets a ridge on its diagonal, raised tenfold until the Cholesky factorisation
    succeeds (moments are rounded to float32).
    """
    E = len(moment_EE)
    ridge = max(_RIDGE * np.trace(moment_EE) / E, np.finfo(np.float64).tiny)
    while np.isfinite(ridge):
        try:
            return np.linalg.cholesky(moment_EE + ridge * np.eye(E)).T
        except np.linalg.LinAlgError:  # rounding made it indefinite
            ridge *= 10
    raise ValueError("the second moment is not finite")


def _column_span(w_KEH: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the matrices in an orthonormal basis [E, P] of their columns, and the basis."""
    K, E, H = w_KEH.shape
    if K * H >= E:
        return w_KEH, np.eye(E)
    basis_EP, columns_PC = np.linalg.qr(w_KEH.transpose(1, 0, 2).reshape(E, K * H))
    return columns_PC.reshape(-1, K, H).transpose(1, 0, 2), basis_EP


def _best_directions(x_KEH: np.ndarray, rank: int) -> np.ndarray:
    """Returns [K, R, H] orthonormal rows that keep the most energy of each matrix."""
    _, vectors_KHH = np.linalg.eigh(x_KEH.transpose(0, 2, 1) @ x_KEH)
    return vectors_KHH[:, :, ::-1][:, :, :rank].transpose(0, 2, 1)


def _procrustes(w_KEH: np.ndarray, target_KEH: np.ndarray, rotations: str) -> np.ndarray:
    """Returns [K, H, H] rotations that bring each w nearest to its target."""
    K, _, H = w_KEH.shape
    if rotations == "none":
        return np.broadcast_to(np.eye(H), (K, H, H)).copy()
    inner_KHH = w_KEH.transpose(0, 2, 1) @ target_KEH
    if rotations == "all":
        left, _, right = np.linalg.svd(inner_KHH)
        return left @ right
    F = H // 2
    first, second = np.arange(F), np.arange(F, H)
    # (k1 c - k2 s, k2 c + k1 s) is nearest to (t1, t2) at angle atan2(k1·t2 - k2·t1, k1·t1 + k2·t2)
    along = inner_KHH[:, first, first] + inner_KHH[:, second, second]
    across = inner_KHH[:, first, second] - inner_KHH[:, second, first]
    angle_KF = np.arctan2(across, along)
    rotation = np.zeros((K, H, H))
    rotation[:, first, first] = rotation[:, second, second] = np.cos(angle_KF)
    rotation[:, first, second] = np.sin(angle_KF)
    rotation[:, second, first] = -np.sin(angle_KF)
    return rotation
