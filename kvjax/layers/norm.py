"""RMSNorm and LayerNorm over the last axis, computed in float32 or wider."""

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.layers.weight import weight

KINDS = ("rms", "layer")


def inverse_rms(x: jax.Array, epsilon: float, axes: int | tuple[int, ...] = -1) -> jax.Array:
    """Returns 1 / rms(x) over `axes`, by default [..., D] -> [..., 1], in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + epsilon)


class Norm(nnx.Module):
    """Normalises [..., D] over D; without gain and bias (the default recipe) it has no parameters.

    Gain and bias may have several axes, of which the last is normalised: axes="J C", dim=(2, 64)
    gives each of two latents its own gain. With `whole`, RMSNorm is over all these axes together.
    With `offset`, gains are 1 + the weight, as in Gemma.
    """

    def __init__(
        self,
        dim: int | tuple[int, ...],
        *,
        kind: str,
        gain: bool,
        bias: bool,
        epsilon: float,
        rngs: nnx.Rngs,
        axes: str = "D",
        whole: bool = False,
        offset: bool = False,
    ):
        self.kind = kind
        self.epsilon = epsilon
        self.offset = offset
        dims = (dim,) if isinstance(dim, int) else dim
        self.axes = tuple(range(-len(dims), 0)) if whole else -1
        sizes = dict(zip(axes.split(), dims, strict=True))
        start = "zeros" if offset else "ones"
        self.gain = weight(axes, rngs, init=start, **sizes) if gain else None
        self.bias = weight(axes, rngs, init="zeros", **sizes) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * inverse_rms(wide, self.epsilon, self.axes)
        return self._affine(wide).astype(x.dtype)

    def _affine(self, x: jax.Array) -> jax.Array:
        if self.gain is not None:
            gain = self.gain[...]
            # In the dtype of x: bfloat16 would round 1 + a small weight.
            gain = 1 + gain.astype(x.dtype) if self.offset else gain
            x = x * _expand_leading(gain, x.ndim)
        if self.bias is not None:
            x = x + _expand_leading(self.bias[...], x.ndim)
        return x


def _expand_leading(w: jax.Array, ndim: int) -> jax.Array:
    """Adds leading axes of length 1 (jnp's implicit rank promotion may be off)."""
    return jnp.expand_dims(w, tuple(range(ndim - w.ndim)))
