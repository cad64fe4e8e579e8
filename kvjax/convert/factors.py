"""Low-rank factors of stacks of matrices, closed form, in float64: what conversions are made of.

Errors are E|x (W - W')|^2 over inputs x of second moment C: with C the identity, Frobenius norms.
All is done through Gram matrices of the outputs, W^T C W.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import numpy as np
import scipy.linalg

from kvjax.foundation import runtime

SWEEPS = 100  # of an alternation, at most
TOLERANCE = 1e-5  # share of the energy: one that lowers the error by less is the last
_RIDGE = 1e-9  # of the mean energy of an input channel
_SMALL = 2048  # rows of a matrix on which BLAS's threads wait for each other more than they work

einsum = functools.partial(np.einsum, optimize=True)  # by BLAS


def few_threads(rows: int):
    """A context in which BLAS uses one thread if matrices have few rows.

    30 layers of 576 channels took 42.6 s with two threads on two cores that another process used
    too, and 1.0 s with one thread.
    """
    return runtime.blas_threads(1 if rows < _SMALL else None)


class Factors(NamedTuple):
    """W_k = latent_j(k) expand_k."""

    latent_EJR: np.ndarray
    expand_KRH: np.ndarray
    error: float  # share of the energy that is lost


def gram(w_EKH: np.ndarray, moment_EE: np.ndarray) -> np.ndarray:
    """[K, H, K, H] inner products of output channels over the inputs."""
    E, K, H = w_EKH.shape
    flat_EC = w_EKH.reshape(E, K * H)
    return (flat_EC.T @ (moment_EE @ flat_EC)).reshape(K, H, K, H)


def energies(w_EKH: np.ndarray, moment_EE: np.ndarray, *, latents: int) -> np.ndarray:
    """[J, K/J·H] energy of each of the best directions of the heads that share a latent."""
    return np.stack([values[::-1] for values, _ in _spectra(w_EKH, moment_EE, latents)])


def low_rank(w_EKH: np.ndarray, rank: int, moment_EE: np.ndarray, *, latents: int) -> Factors:
    """The best factors of rank R (Eckart-Young), one latent for every K/J heads.

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
    """For each latent, the eigenvalues, ascending, and eigenvectors of its heads' Gram matrix."""
    E = w_EKH.shape[0]
    w_EJC = w_EKH.reshape(E, latents, -1)
    for j in range(latents):
        weighted = moment_EE @ w_EJC[:, j]
        values, vectors = np.linalg.eigh(w_EJC[:, j].T @ weighted)
        yield np.maximum(values, 0), vectors


def balance_scales(
    left: np.ndarray, right: np.ndarray, axes: Sequence[tuple[int, ...]]
) -> np.ndarray:
    """What to multiply channels of one factor by, and divide those of the other by, so that the
    numbers of both are of one size.

    An optimizer's step is of one size for all numbers: a factor of large ones would hardly learn.

    Args:
      axes: of each factor, those that are no channels.
    """

    def size(x, over):
        return np.sqrt(np.mean(x**2, axis=over))

    one, other = size(left, axes[0]), size(right, axes[1])
    there = (one > 0) & (other > 0)
    return np.sqrt(np.divide(other, one, out=np.ones_like(one), where=there))


class BaseAndResidual(NamedTuple):
    """W_k turn_k = base_j(k) + latent_k expand_k (LRKV eq. 2), turn_k a rotation."""

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
    """Shared bases and residuals of rank R, by alternating closed forms; no step raises the error.

    In turn: of every head the rotation that brings it nearest to what stands for it (Procrustes),
    the residual (Eckart-Young), the base (a mean). It starts with rank 0: heads that are turned
    towards their mean.

    Args:
      bases: J; heads k·J // K share one.
      turns: which rotations are free: "none", "pairs" (of channels i and i + H/2, which commute
        with RoPE) or "all".
      step: it goes through the multiples of it on its way to R; 0: through none.
      sweeps: through the three at each rank, at most.
      tolerance: it ends when a sweep lowers the error by less than this share of the energy.
    """
    with runtime.blas_threads(1):  # many small products
        found = _AlternatingFit(w_EKH, moment_EE, bases, rotations)
        through = range(step, rank, step) if step else ()
        for each in (0, *through, rank) if rank else (0,):
            found.improve(each, sweeps, tolerance)
        return found.result(rank)


def losses_by_rank(
    w_EKH: np.ndarray, ranks: Sequence[int], moment_EE: np.ndarray, *, bases: int, rotations: str
) -> list[float]:
    """The share of the energy that `base_and_residual` loses at each of these ranks.

    Args:
      ranks: ascending multiples of its `step`; the last may be none.
    """
    with runtime.blas_threads(1):
        found, lost = _AlternatingFit(w_EKH, moment_EE, bases, rotations), []
        found.improve(0, SWEEPS, TOLERANCE)
        for rank in ranks:
            found.improve(rank, SWEEPS, TOLERANCE)
            lost.append(found.lost(rank))
        return lost


class _AlternatingFit:
    """The state of `base_and_residual`, where inner products over inputs are the plain ones."""

    def __init__(self, w_EKH: np.ndarray, moment_EE: np.ndarray, bases: int, rotations: str):
        _, K, H = w_EKH.shape
        self.rotations, self.of_base = rotations, np.arange(K) * bases // K
        self.root_EE = _root(moment_EE)
        self.w, self.basis_EP = _column_span(einsum("EF,FKH->KEH", self.root_EE, w_EKH))
        self.total = np.sum(self.w**2)
        # Heads turn towards the first one of their base.
        self.base = self.w[np.searchsorted(self.of_base, np.arange(bases))]
        self.residual = np.zeros_like(self.w)
        self.rotation = np.broadcast_to(np.eye(H), (K, H, H)).copy()

    def improve(self, rank: int, sweeps: int, tolerance: float) -> None:
        """Sweeps with residuals of that rank."""
        error = np.inf
        for _ in range(sweeps):
            self.rotation = _procrustes(self.w, self._head_bases() + self.residual, self.rotations)
            turned = self.w @ self.rotation
            if rank:
                gap = turned - self._head_bases()
                expand = _best_directions(gap, rank)
                self.residual = gap @ expand.transpose(0, 2, 1) @ expand
            left = turned - self.residual
            bases = range(len(self.base))
            self.base = np.stack([left[self.of_base == j].mean(axis=0) for j in bases])
            before, error = error, np.sum((left - self._head_bases()) ** 2)
            if before - error < tolerance * self.total:
                break

    def lost(self, rank: int) -> float:
        """Share of the energy, with the last base's own residual of that rank."""
        return self._factors(rank)[-1]

    def result(self, rank: int) -> BaseAndResidual:
        """What was found, for the weights as they were given."""
        latent, expand, lost = self._factors(rank)

        def out(x):
            return scipy.linalg.solve_triangular(self.root_EE, self.basis_EP @ x)

        base_EJH = np.stack([out(x) for x in self.base], axis=1)
        latent_EKR = np.stack([out(x) for x in latent], axis=1)
        return BaseAndResidual(base_EJH, latent_EKR, expand, self.rotation, lost)

    def _head_bases(self) -> np.ndarray:
        """[K, E, H] base of every head."""
        return self.base[self.of_base]

    def _factors(self, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
        gap = self.w @ self.rotation - self._head_bases()
        expand = _best_directions(gap, rank)
        latent = gap @ expand.transpose(0, 2, 1)
        lost = np.sum((gap - latent @ expand) ** 2)
        return latent, expand, float(lost / self.total) if self.total else 0.0


def _root(moment_EE: np.ndarray) -> np.ndarray:
    """A square root of full rank: L^T with L L^T the moment, raised where that is singular.

    By as little as its rounding, to float32 as a rule, asks for.
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
    """The same matrices in the basis of their columns' span, and that basis [E, P]."""
    K, E, H = w_KEH.shape
    if K * H >= E:
        return w_KEH, np.eye(E)
    basis_EP, columns_PC = np.linalg.qr(w_KEH.transpose(1, 0, 2).reshape(E, K * H))
    return columns_PC.reshape(-1, K, H).transpose(1, 0, 2), basis_EP


def _best_directions(x_KEH: np.ndarray, rank: int) -> np.ndarray:
    """[K, R, H] orthonormal rows that keep most of each matrix."""
    _, vectors_KHH = np.linalg.eigh(x_KEH.transpose(0, 2, 1) @ x_KEH)
    return vectors_KHH[:, :, ::-1][:, :, :rank].transpose(0, 2, 1)


def _procrustes(w_KEH: np.ndarray, target_KEH: np.ndarray, rotations: str) -> np.ndarray:
    """[K, H, H] rotations of each w that bring it nearest to its target."""
    K, _, H = w_KEH.shape
    if rotations == "none":
        return np.broadcast_to(np.eye(H), (K, H, H)).copy()
    inner_KHH = w_KEH.transpose(0, 2, 1) @ target_KEH
    if rotations == "all":
        left, _, right = np.linalg.svd(inner_KHH)
        return left @ right
    F = H // 2
    first, second = np.arange(F), np.arange(F, H)
    # k' = k1 c - k2 s beside k2 c + k1 s, nearest to t: the angle of (k1·t1 + k2·t2, k1·t2 - k2·t1)
    along = inner_KHH[:, first, first] + inner_KHH[:, second, second]
    across = inner_KHH[:, first, second] - inner_KHH[:, second, first]
    angle_KF = np.arctan2(across, along)
    turn = np.zeros((K, H, H))
    turn[:, first, first] = turn[:, second, second] = np.cos(angle_KF)
    turn[:, first, second] = np.sin(angle_KF)
    turn[:, second, first] = -np.sin(angle_KF)
    return turn
