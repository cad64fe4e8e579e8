"""What decode attention needs besides the cache: one class per way of reading a cache.

Query head n reads KV head k(n) = n·K // N, which reads base j(k) = k·J // K. `cache` is a dict of
arrays whose last axis is the token: the entry of a mechanism, [B, *field.shape, S].
"""

import dataclasses
import functools

import jax

_static = functools.partial(dataclasses.field, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionBias:
    """A bias of every logit by the position s of its key: sum_c weights[c]·encoding[s, c].

    `encoding` is `kvjax.layers.sinusoid.encoding(s, C)`.
    """

    weights: jax.Array  # [C]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
    """The cache holds keys and values as they are used: MHA, GQA, MQA, thin keys, Q=K-V.

    cache: base_key [B, K, H, S], base_value [B, K, Hv, S].
    """

    query: jax.Array  # [B, T, N, H]
    bias: PositionBias | None = None
    scale: float = _static()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """A shared base and a low-rank residual per head: LRKV, LRKV x GQA.

    key = key_scale·(base_key + Rot(residual_key expand_key)), value as in LRKV eq. 2.

    cache: base_key [B, J, H, S], rotated; base_value [B, J, Hv, S]; residual_key and
    residual_value [B, K, R, S]; key_scale [B, K, 1, S] float32 or wider, where keys are normed.
    """

    query: jax.Array  # [B, T, N, H], meets the base
    residual_query: jax.Array  # [B, T, N, H], meets the residual; `query` if rope_base is given
    expand_key: jax.Array  # [K, R, H]
    expand_value: jax.Array  # [K, R, Hv]
    bias: PositionBias | None = None
    scale: float = _static()
    rope_base: float | None = _static()  # None: the residual is not rotated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tied:
    """Values are the keys before norm and RoPE: Q-K=V, Q=K=V, and LRKV with tied values.

    value = base_key + residual_key expand_key, key = Rot(norm(value)·gain); the residual is
    optional.

    cache: base_key [B, J, H, S]; residual_key [B, K, R, S] if there is `expand_key`.
    """

    query: jax.Array  # [B, T, N, H]
    expand_key: jax.Array | None = None  # [K, R, H]
    gain: jax.Array | None = None  # [H]
    bias: PositionBias | None = None
    scale: float = _static()
    rope_base: float | None = _static()
    norm_epsilon: float | None = _static()  # of RMSNorm; None: keys are not normed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Absorbed MLA: a key is [latent, rope_key], its value the latent; both serve all heads.

    cache: latent [B, C, S], rope_key [B, P, S].
    """

    query: jax.Array  # [B, T, N, C]: the content query times up_key
    rope_query: jax.Array  # [B, T, N, P]
    up_value: jax.Array  # [C, N, Hv]
    scale: float = _static()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebuiltLatent:
    """Keys rebuilt per head from a latent, normed and rotated: `mla_paper`.

    key = Rot(norm(latent up_key)·gain), value = latent up_value.

    cache: latent [B, C, S].
    """

    query: jax.Array  # [B, T, N, H]
    up_key: jax.Array  # [C, N, H]
    up_value: jax.Array  # [C, N, Hv]
    gain: jax.Array | None = None  # [H]
    scale: float = _static()
    rope_base: float | None = _static()
    norm_epsilon: float | None = _static()


Operands = Grouped | Residual | Tied | Latent | RebuiltLatent

for _cls in (PositionBias, Grouped, Residual, Tied, Latent, RebuiltLatent):
    jax.tree_util.register_dataclass(_cls)
