"""PCA initialisation of LRKV: bases and residuals that best approximate independent heads."""

import jax
import jax.numpy as jnp


def pca_factors(heads_DKH: jax.Array, J: int, R: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Factors heads' matrices into bases [D, J, H], U [D, K, R] and B [K, R, H].

    A base is the mean of the heads that share it; U B is the truncated SVD of head - base. LRKV's
    section C.11 suggests initialising by PCA, but does not define how.
    """
    D, K, H = heads_DKH.shape
    heads_DJkH = heads_DKH.reshape(D, J, K // J, H)
    base_DJ1H = jnp.mean(heads_DJkH, axis=2, keepdims=True)
    residual_KDH = jnp.moveaxis((heads_DJkH - base_DJ1H).reshape(D, K, H), 1, 0)
    u_KDH, s_KH, v_KHH = jnp.linalg.svd(residual_KDH, full_matrices=False)
    root_KR = jnp.sqrt(s_KH[:, :R])
    latent_KDR = u_KDH[..., :R] * root_KR[:, None]
    expand_KRH = root_KR[..., None] * v_KHH[:, :R]
    return base_DJ1H[:, :, 0], jnp.moveaxis(latent_KDR, 0, 1), expand_KRH
