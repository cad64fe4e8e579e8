"""Shapes of decode attention in real models, for tests, profiles and tuning.

d12 and d36 are the LRKV paper's smallest and its 2.5B model: 6 and 18 heads of 128, rank 64.
"""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention.cache_layouts.factored import FactoredSizes
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.kernels.decode_attention.cache_layouts.layout import DecodeFlops, DecodeInputs, Sizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes


@dataclasses.dataclass(frozen=True)
class Quantized:
    """The sizes of a cache that is stored in int8 or int4, as by `kvjax.cache.quantized`."""

    sizes: Sizes
    bits: int = 8

    @property
    def N(self) -> int:
        return self.sizes.N

    def example(self, draw: Callable[..., jax.Array], B: int) -> DecodeInputs:
        return self.sizes.example(draw, B)

    def fields(self) -> dict[str, tuple[int, ...]]:
        fields = {}
        for name, dims in self.sizes.fields().items():
            if name in _NOT_QUANTIZED:
                fields[name] = dims
                continue
            fields[name] = (*dims[:-1], dims[-1] * self.bits // 8)
            fields[f"{name}.scale"] = (*dims[:-1], 1)
        return fields

    def flops(self) -> DecodeFlops:
        return self.sizes.flops()


_NOT_QUANTIZED = ("key_scale", "rope_key")


def _model(N: int, *, groups: int, latent: int) -> dict[str, Sizes]:
    return dict(
        mha=GroupedSizes(N=N, K=N),
        gqa=GroupedSizes(N=N, K=groups),
        mqa=GroupedSizes(N=N, K=1),
        thin_keys=GroupedSizes(N=N, K=N, H=32),
        lrkv=ResidualSizes(N=N, K=N),  # exact under RoPE and QK-norm
        lrkv_no_norm=ResidualSizes(N=N, K=N, scaled=False),
        lrkv_no_rope=ResidualSizes(N=N, K=N, rope_base=None),
        lrkv_gqa=ResidualSizes(N=N, K=groups),
        low_rank_keys=FactoredSizes(N=N, K=groups, J=groups),  # GQA, converted
        mla=LatentSizes(N=N, C=latent),
    )


def _rivals(N: int, *, groups: int, latent: int, wide: tuple[int, int]) -> dict[str, Sizes]:
    """Mechanisms by other authors with a cache as large as MLA's (*_narrow_* of configs/rivals.py).

    Args:
      wide: heads and channels of mechanisms that have few, wide heads.
    """
    heads, dim = wide
    return dict(
        gla=LatentSizes(N=N, C=latent // 2, J=2),
        mlra2=LatentSizes(N=2 * N, C=latent // 4, J=4),
        mlra4=LatentSizes(N=4 * N, C=latent // 4, J=4),
        gta=LatentSizes(N=N, C=128, J=groups, key_channels=64, Hv=0),
        shared_kv=LatentSizes(N=heads, C=dim, J=2, P=0, Hv=0),
        mfa=GroupedSizes(N=heads, K=1, H=dim, Hv=dim),
    )


_RIVALS = dict(
    d12=_rivals(6, groups=2, latent=256, wide=(8, 160)),
    d36=_rivals(18, groups=6, latent=768, wide=(10, 416)),
)
RIVALS = tuple(_RIVALS["d36"])
_UNQUANTIZED: dict[str, dict[str, Sizes]] = dict(
    d12=_model(6, groups=3, latent=256) | _RIVALS["d12"],
    d36=_model(18, groups=6, latent=768) | _RIVALS["d36"],
)
OURS = tuple(name for name in _UNQUANTIZED["d36"] if name not in RIVALS)
SHAPES = {
    model: by_name
    | {
        f"{name}_int{bits}": Quantized(sizes, bits)
        for bits in (8, 4)
        for name, sizes in by_name.items()
    }
    for model, by_name in _UNQUANTIZED.items()
}


def _cache_dtype(shape: Sizes, name: str, dtype: jnp.dtype) -> jnp.dtype:
    if name == "key_scale":
        return jnp.promote_types(dtype, jnp.float32)
    if name.endswith(".scale"):
        return jnp.dtype(jnp.float32)
    if isinstance(shape, Quantized) and name not in _NOT_QUANTIZED:
        return jnp.dtype(jnp.int8 if shape.bits == 8 else jnp.uint8)
    return jnp.dtype(dtype)


def problem(
    shape: Sizes, *, batch: int, length: int, dtype: jnp.dtype, seed: int = 0
) -> tuple[DecodeInputs, dict[str, jax.Array]]:
    """Draws inputs and a full cache without zeros; logits are as large as with normed keys."""
    key = iter(jax.random.split(jax.random.key(seed), 16))

    def draw(*dims):
        return jax.random.normal(next(key), dims, dtype)

    inputs, cache = shape.example(draw, batch), {}
    for name, dims in shape.fields().items():
        dims, of_field = (batch, *dims, length), _cache_dtype(shape, name, dtype)
        if name == "key_scale":
            cache[name] = jax.random.uniform(next(key), dims, of_field, 0.5, 1.5)
        elif name.endswith(".scale"):
            deviation = 73 if shape.bits == 8 else 4.3  # of integers up to 127 and up to 7
            cache[name] = jax.random.uniform(next(key), dims, of_field, 0.5, 1.5) / deviation
        elif of_field == jnp.int8:
            cache[name] = jax.random.randint(next(key), dims, -127, 128, of_field)
        elif of_field == jnp.uint8:
            low, high = jax.random.randint(next(key), (2, *dims), 1, 16, of_field)
            cache[name] = low | (high << 4)
        else:
            cache[name] = draw(*dims)
    return inputs, cache


def abstract(
    shape: Sizes, *, batch: int, length: int, dtype: jnp.dtype
) -> tuple[DecodeInputs, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the shapes and dtypes of `problem`."""
    return jax.eval_shape(lambda: problem(shape, batch=batch, length=length, dtype=dtype))


def bytes_per_token(shape: Sizes, dtype: jnp.dtype) -> int:
    """Returns the logical bytes of a cached token: the bytes that reading it moves."""
    return sum(
        math.prod(dims) * np.dtype(_cache_dtype(shape, name, dtype)).itemsize
        for name, dims in shape.fields().items()
    )
