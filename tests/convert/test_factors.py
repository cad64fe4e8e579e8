"""Low-rank factors are optimal, and no sweep raises the error of a base."""

import itertools

import numpy as np
import pytest

from kvjax.convert import factors

E, K, H = 12, 4, 6


def _w(seed=0, K=K):
    return np.random.default_rng(seed).standard_normal((E, K, H))


def _moment(seed=1):
    x = np.random.default_rng(seed).standard_normal((50, E)) * np.linspace(0.1, 3, E)
    return x.T @ x / 50, x


def _expand_factors(found):
    J = found.latent_EJR.shape[1]
    latent = np.repeat(found.latent_EJR, K // J, axis=1)
    return np.einsum("EKR,KRH->EKH", latent, found.expand_KRH)


@pytest.mark.parametrize("latents", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_low_rank_is_optimal(latents, rank):
    """Compares with the truncated SVD of X W (Eckart-Young)."""
    moment, x = _moment()
    w = _w()
    found = factors.low_rank(w, rank, moment, latents=latents)
    assert found.latent_EJR.shape == (E, latents, rank)
    assert found.expand_KRH.shape == (K, rank, H)
    lost = total = 0.0
    products = []
    for j in range(latents):
        part = x @ w[:, j * K // latents : (j + 1) * K // latents].reshape(E, -1)
        left, values, right = np.linalg.svd(part, full_matrices=False)
        products.append((left[:, :rank] * values[:rank]) @ right[:rank])
        lost, total = lost + np.sum(values[rank:] ** 2), total + np.sum(values**2)
    best = np.concatenate(products, axis=1).reshape(50, K, H)
    y = np.einsum("xE,EKH->xKH", x, _expand_factors(found))
    np.testing.assert_allclose(y, best, atol=1e-9)
    assert found.error == pytest.approx(lost / total, abs=1e-12)


def test_energies():
    moment, _ = _moment()
    energy = factors.energies(_w(), moment, latents=2)
    assert energy.shape == (2, K // 2 * H) and np.all(np.diff(energy) <= 1e-9)
    for rank in (1, 5, 12):
        error = factors.low_rank(_w(), rank, moment, latents=2).error
        assert error == pytest.approx(energy[:, rank:].sum() / energy.sum(), abs=1e-12)


def _error(w, found, moment, bases):
    """Returns the share of energy lost, from the returned factors alone."""
    base = np.repeat(found.base_EJH, K // bases, axis=1)
    new = base + np.einsum("EKR,KRH->EKH", found.latent_EKR, found.expand_KRH)
    gap = np.einsum("EKH,KHI->EKI", w, found.rotation_KHH) - new

    def energy(x):
        return np.einsum("EKH,EF,FKH->", x, moment, x)

    return energy(gap) / energy(w)


def test_inputs_that_are_always_zero():
    """A layer that was switched off has such inputs; the fit must end."""
    found = factors.base_and_residual(_w(), 1, np.zeros((E, E)), bases=1, rotations="all")
    assert np.isfinite(found.base_EJH).all() and np.isfinite(found.latent_EKR).all()
    assert 0 <= found.error <= 1
    with pytest.raises(ValueError, match="not finite"):
        factors.base_and_residual(_w(), 1, np.full((E, E), np.nan), bases=1, rotations="all")


@pytest.mark.parametrize("rotations", ["none", "pairs", "all"])
@pytest.mark.parametrize("bases, rank", [(1, 0), (1, 2), (2, 3), (4, 0)])
def test_base_and_residual(rotations, bases, rank):
    moment, _ = _moment()
    w = _w()
    errors = []
    for sweeps in (1, 3, 10, 60):
        options = dict(bases=bases, rotations=rotations, sweeps=sweeps, tolerance=0.0)
        found = factors.base_and_residual(w, rank, moment, **options)
        assert found.base_EJH.shape == (E, bases, H)
        assert found.latent_EKR.shape == (E, K, rank) and found.expand_KRH.shape == (K, rank, H)
        assert found.error == pytest.approx(_error(w, found, moment, bases), abs=1e-8)
        np.testing.assert_allclose(
            found.rotation_KHH @ found.rotation_KHH.transpose(0, 2, 1),
            np.broadcast_to(np.eye(H), (K, H, H)),
            atol=1e-12,
        )
        errors.append(found.error)
    if bases == K:
        assert max(errors) < 1e-12  # every head has its own base
        return
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(errors))
    if rotations != "none":
        assert errors[-1] < errors[0]
    nothing_shared = factors.low_rank(w, rank, moment, latents=K).error if rank else 1.0
    assert errors[-1] < nothing_shared  # sharing a base lowers the error


def _pair_rotations(angles):
    """Returns [..., H, H] rotations of channels i and i + H/2 by angles [..., H/2]."""
    cos, sin = (f(angles)[..., None] * np.eye(H // 2) for f in (np.cos, np.sin))
    return np.concatenate(
        [np.concatenate([cos, sin], axis=-1), np.concatenate([-sin, cos], axis=-1)], axis=-2
    )


@pytest.mark.parametrize("rotations", ["pairs", "all"])
def test_rotations_of_one_head_need_no_residual(rotations):
    """Heads that are rotations of one head; without rotations a base does not fit them."""
    rng = np.random.default_rng(3)
    one = rng.standard_normal((E, H))
    if rotations == "all":
        rotation_KHH = np.linalg.qr(rng.standard_normal((K, H, H)))[0]
    else:
        angle = rng.uniform(0, 2 * np.pi, (K, H // 2))
        rotation_KHH = np.zeros((K, H, H))
        first, second = np.arange(H // 2), np.arange(H // 2, H)
        rotation_KHH[:, first, first] = rotation_KHH[:, second, second] = np.cos(angle)
        rotation_KHH[:, first, second], rotation_KHH[:, second, first] = (
            np.sin(angle),
            -np.sin(angle),
        )
    w = np.einsum("EH,KHI->EKI", one, rotation_KHH)
    moment = np.eye(E)
    assert factors.base_and_residual(w, 0, moment, bases=1, rotations=rotations).error < 1e-6
    assert factors.base_and_residual(w, 0, moment, bases=1, rotations="none").error > 0.2


def test_pair_rotations_commute_with_rope():
    w = _w()
    found = factors.base_and_residual(w, 2, np.eye(E), bases=1, rotations="pairs")
    rotation = _pair_rotations(np.random.default_rng(0).uniform(0, 2 * np.pi, H // 2))
    for rotation_KHH in found.rotation_KHH:
        np.testing.assert_allclose(rotation_KHH @ rotation, rotation @ rotation_KHH, atol=1e-12)
    assert np.abs(found.rotation_KHH - np.eye(H)).max() > 0.1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_moment_that_rounding_made_indefinite(scale):
    """Inputs after LayerNorm span D - 1 channels; in float32 an eigenvalue is negative."""
    x = np.random.default_rng(0).standard_normal((999, E)) * scale
    x -= x.mean(axis=1, keepdims=True)
    moment = np.float64(np.float32(x.T @ x / 999)) - 1e-7 * scale**2 * np.eye(E)
    assert np.linalg.eigvalsh(moment)[0] < 0
    found = factors.base_and_residual(_w(), 3, moment, bases=1, rotations="all")
    assert found.error == pytest.approx(_error(_w(), found, moment, 1), abs=1e-5)


def test_a_moment_without_full_rank():
    """Inputs span few channels; factors are finite in the others."""
    x = np.random.default_rng(0).standard_normal((5, E))
    moment = x.T @ x / 5
    found = factors.base_and_residual(_w(), 3, moment, bases=1, rotations="all")
    assert np.isfinite(found.base_EJH).all() and np.isfinite(found.latent_EKR).all()
    assert found.error == pytest.approx(_error(_w(), found, moment, 1), abs=1e-6)
