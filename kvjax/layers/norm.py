"""RMSNorm and LayerNorm over the last axis, computed in float32 or wider."""

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.layers.weight import weight

KINDS = ("rms", "layer")


def inverse_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """[..., 1] reciprocal root mean square of [..., D], in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)


class Norm(nnx.Module):
    """Normalises [..., D] over D; without gain it has no parameters (the recipe's default)."""

    def __init__(
        self,
        dim: int,
        *,
        kind: str,
        gain: bool,
        bias: bool,
        epsilon: float,
        rngs: nnx.Rngs,
        axis: str = "D",
    ):
        self.kind = kind
        self.epsilon = epsilon
        self.gain = weight(axis, rngs, init="ones", **{axis: dim}) if gain else None
        self.bias = weight(axis, rngs, init="zeros", **{axis: dim}) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * inverse_rms(wide, self.epsilon)
        return self._affine(wide).astype(x.dtype)

    def _affine(self, x: jax.Array) -> jax.Array:
        trailing = (1,) * (x.ndim - 1) + (-1,)
        if self.gain is not None:
            x = x * self.gain[...].reshape(trailing)
        if self.bias is not None:
            x = x + self.bias[...].reshape(trailing)
        return x
