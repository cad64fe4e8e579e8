"""Real models' decode attention as arrays: what tests, profiles and tuning share.

d12 and d36 are the LRKV paper's smallest and its 2.5B model: 6 and 18 heads of 128, rank 64.
"""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention import operands as operands_lib
from kvjax.kernels.decode_attention.operands import Operands

ROPE_BASE = 10_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
    """N query heads on K KV heads, key dim H, value dim Hv."""

    N: int
    K: int
    H: int = 128
    Hv: int = 128

    def operands(self, draw: Callable, B: int) -> Operands:
        return operands_lib.Grouped(query=draw(B, 1, self.N, self.H), scale=self.H**-0.5)

    def fields(self) -> dict[str, tuple[int, ...]]:
        return dict(base_key=(self.K, self.H), base_value=(self.K, self.Hv))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """K residuals of rank R on J bases; `rotated`: under RoPE; `scaled`: keys are normed."""

    N: int
    K: int
    J: int = 1
    R: int = 64
    H: int = 128
    Hv: int = 128
    rotated: bool = True
    scaled: bool = True

    def operands(self, draw: Callable, B: int) -> Operands:
        query = draw(B, 1, self.N, self.H)
        return operands_lib.Residual(
            query=query,
            residual_query=query if self.rotated else draw(B, 1, self.N, self.H),
            expand_key=draw(self.K, self.R, self.H) / self.R**0.5,
            expand_value=draw(self.K, self.R, self.Hv) / self.R**0.5,
            scale=self.H**-0.5,
            rope_base=ROPE_BASE if self.rotated else None,
        )

    def fields(self) -> dict[str, tuple[int, ...]]:
        fields = dict(
            base_key=(self.J, self.H),
            base_value=(self.J, self.Hv),
            residual_key=(self.K, self.R),
            residual_value=(self.K, self.R),
        )
        return fields | (dict(key_scale=(self.K, 1)) if self.scaled else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Absorbed MLA: a latent of C channels and a rotated key of P, values of Hv channels."""

    N: int
    C: int
    P: int = 64
    Hv: int = 128

    def operands(self, draw: Callable, B: int) -> Operands:
        return operands_lib.Latent(
            query=draw(B, 1, self.N, self.C),
            rope_query=draw(B, 1, self.N, self.P),
            up_value=draw(self.C, self.N, self.Hv) / self.C**0.5,
            scale=(self.C + self.P) ** -0.5,
        )

    def fields(self) -> dict[str, tuple[int, ...]]:
        return dict(latent=(self.C,), rope_key=(self.P,))


Shape = Grouped | Residual | Latent


def _model(N: int, *, groups: int, latent: int) -> dict[str, Shape]:
    return dict(
        mha=Grouped(N=N, K=N),
        gqa=Grouped(N=N, K=groups),
        mqa=Grouped(N=N, K=1),
        thin_keys=Grouped(N=N, K=N, H=32),
        lrkv=Residual(N=N, K=N),  # exact under RoPE and QK-norm
        lrkv_no_norm=Residual(N=N, K=N, scaled=False),
        lrkv_no_rope=Residual(N=N, K=N, rotated=False),
        lrkv_gqa=Residual(N=N, K=groups),
        mla=Latent(N=N, C=latent),
    )


SHAPES: dict[str, dict[str, Shape]] = dict(
    d12=_model(6, groups=3, latent=256), d36=_model(18, groups=6, latent=768)
)


def _cache_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32) if name == "key_scale" else jnp.dtype(dtype)


def problem(
    shape: Shape, *, batch: int, length: int, dtype: jnp.dtype, seed: int = 0
) -> tuple[Operands, dict[str, jax.Array]]:
    """Random operands and a full cache, none of it zero; keys have the logits of normed ones."""
    key = iter(jax.random.split(jax.random.key(seed), 16))
    draw = lambda *dims: jax.random.normal(next(key), dims, dtype)
    operands = shape.operands(draw, batch)
    cache = {name: draw(batch, *dims, length) for name, dims in shape.fields().items()}
    if "key_scale" in cache:
        dims = cache["key_scale"].shape
        wide = _cache_dtype("key_scale", dtype)
        cache["key_scale"] = jax.random.uniform(next(key), dims, wide, 0.5, 1.5)
    return operands, cache


def abstract(
    shape: Shape, *, batch: int, length: int, dtype: jnp.dtype
) -> tuple[Operands, dict[str, jax.ShapeDtypeStruct]]:
    """The shapes and dtypes of `problem`."""
    return jax.eval_shape(lambda: problem(shape, batch=batch, length=length, dtype=dtype))


def bytes_per_token(shape: Shape, dtype: jnp.dtype) -> int:
    """Logical bytes that a cached token takes, and that reading it moves."""
    return sum(
        math.prod(dims) * np.dtype(_cache_dtype(name, dtype)).itemsize
        for name, dims in shape.fields().items()
    )
