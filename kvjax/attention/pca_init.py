"""A start for LRKV: the base and residuals that come nearest to whole heads."""

import jax
import jax.numpy as jnp


def pca_factors(whole_DKH: jax.Array, J: int, R: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bases [D, J, H], U [D, K, R] and B [K, R, H] that come nearest to whole heads.

    A base is the mean of the heads that read it. What is left of each head keeps its R leading
    components (LRKV, section C.11, proposes a start of that kind, and gives none).
    """
    D, K, H = whole_DKH.shape
    heads_DJkH = whole_DKH.reshape(D, J, K // J, H)
    base_DJ1H = jnp.mean(heads_DJkH, axis=2, keepdims=True)
    left_KDH = jnp.moveaxis((heads_DJkH - base_DJ1H).reshape(D, K, H), 1, 0)
    u_KDH, s_KH, v_KHH = jnp.linalg.svd(left_KDH, full_matrices=False)
    root_KR = jnp.sqrt(s_KH[:, :R])
    latent_KDR = u_KDH[..., :R] * root_KR[:, None]
    expand_KRH = root_KR[..., None] * v_KHH[:, :R]
    return base_DJ1H[:, :, 0], jnp.moveaxis(latent_KDR, 0, 1), expand_KRH
