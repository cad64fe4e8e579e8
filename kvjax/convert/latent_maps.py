"""The attention of one layer in the form of MLA, as linear maps in float64.

    c = x W^D or norm(x W^D)      r = Rot(x W^R)      k_n = [c W_n^UK, r]      v_n = c W_n^UV

A mechanism's activations `raw` are linear in its input, except for the norm of a latent, and keys
and values are linear in `raw`. So any mechanism's module gives its maps when it is applied to
identity matrices. All heads share r, the rotated part of their keys. The rest of the keys, and all
values, are expanded from c.
"""

from collections.abc import Mapping
import dataclasses
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import GroupedConfig, MFAKRConfig, MLAConfig, SharedKVConfig
from kvjax.attention.mechanism import Mechanism, MechanismConfig
from kvjax.layers.rope import Positions

_BIASES = dict(query_bias="NH", rope_query_bias="NP", rope_key_bias="P")  # names and axes
_UNROTATED = Positions(np.zeros((1, 1), np.int32), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Numbers of channels."""

    latent: int  # C, of c
    rope: int  # P, of r
    content: int  # H, of the part of a key that is expanded from c
    value: int  # Hv


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentMaps:
    """The maps of one layer; Q is the width of the queries' input: D, or the rank of queries.

    Biases are None in mechanisms without `qk_bias`.
    """

    query_down_DQ: np.ndarray | None  # None: queries read x
    query_QNH: np.ndarray
    rope_query_QNP: np.ndarray
    down_DC: np.ndarray
    rope_key_DP: np.ndarray
    up_key_CNH: np.ndarray
    up_value_CNV: np.ndarray
    query_bias_NH: np.ndarray | None = None
    rope_query_bias_NP: np.ndarray | None = None
    rope_key_bias_P: np.ndarray | None = None


def has_normed_latent(mechanism: MechanismConfig) -> bool:
    """Returns True if keys and values are expanded from a normalised latent."""
    if isinstance(mechanism, MLAConfig):
        return mechanism.norm_latent
    return isinstance(mechanism, SharedKVConfig)


def sizes(mechanism: MechanismConfig, d_model: int, *, rope: bool) -> LatentSizes:
    """Returns the sizes of a mechanism in this form.

    C is the number of cached activations, or the largest rank of the maps if that is smaller.

    Args:
      rope: the model has RoPE.
    """
    rotated = len(_rotated(mechanism, rope))
    content = mechanism.query_dim - rotated
    shapes = {name: field.shape for name, field in mechanism.entry().items()}
    latent = sum(math.prod(shapes[name]) for name in _latent_fields(mechanism, rope))
    if not has_normed_latent(mechanism):
        outputs = mechanism.key_heads * (content + mechanism.value_dim)
        latent = min(latent, d_model, outputs)
    return LatentSizes(latent=latent, rope=rotated, content=content, value=mechanism.value_dim)


def _rotated(mechanism: MechanismConfig, rope: bool) -> range:
    """Returns the channels of a key that are rotated."""
    return range(mechanism.query_dim)[mechanism.rotated_channels] if rope else range(0)


def _latent_fields(mechanism: MechanismConfig, rope: bool) -> list[str]:
    """Returns the cache fields that values, or unrotated channels of keys, are computed from."""
    rotated = {"rope_key"}
    if isinstance(mechanism, GroupedConfig):
        if mechanism.splits_rope:
            rotated = {"base_key"}
        elif not mechanism.ties_values:
            rotated = {"base_key", "residual_key"}
    elif not isinstance(mechanism, MFAKRConfig):
        rotated |= {"key"}
    return [name for name in mechanism.entry() if not (rope and name in rotated)]


def of_layer(
    mechanism: MechanismConfig, weights: Mapping, d_model: int, *, rope: bool
) -> LatentMaps:
    """Returns the maps of a layer.

    Args:
      weights: the mechanism's module as a pure dict.
      rope: the model has RoPE.
    """
    with jax.enable_x64(True):
        module = _linear_module(mechanism, weights, d_model)
        query_1QNH, raw = module.project(jnp.eye(d_model)[None], _UNROTATED)
        key_1AKH, value_1AKV = module.keys_values(_unit_activations(raw), _UNROTATED)
        value_1AKV = module.combine(value_1AKV, _UNROTATED)
    query_QNH, key_AKH, value_AKV = map(np.asarray, (query_1QNH[0], key_1AKH[0], value_1AKV[0]))
    down_DA = np.concatenate([np.reshape(x, (d_model, -1)) for x in raw.values()], axis=1)
    fields = _latent_fields(mechanism, rope)
    cached_A = np.repeat([name in fields for name in raw], [_channels(x) for x in raw.values()])
    rotated = _rotated(mechanism, rope)
    content = np.delete(np.arange(mechanism.query_dim), rotated)
    up_CKX = np.concatenate([key_AKH[cached_A][..., content], value_AKV[cached_A]], axis=-1)
    down_DC, up_CKX = _factors_of_rank(
        down_DA[:, cached_A], up_CKX, sizes(mechanism, d_model, rope=rope).latent
    )
    up_CNX = np.repeat(up_CKX, mechanism.num_heads // mechanism.key_heads, axis=1)
    return LatentMaps(
        query_down_DQ=np.asarray(module.query_down[...]) if mechanism.query_rank else None,
        query_QNH=query_QNH[..., content],
        rope_query_QNP=query_QNH[..., rotated],
        down_DC=down_DC,
        rope_key_DP=down_DA @ key_AKH[:, 0, rotated],
        up_key_CNH=up_CNX[..., : len(content)],
        up_value_CNV=up_CNX[..., len(content) :],
        **{f"{name}_{axes}": weights.get(name) for name, axes in _BIASES.items()},
    )


def _linear_module(mechanism: MechanismConfig, weights: Mapping, d_model: int) -> Mechanism:
    """Returns the module in float64, made linear: without norms of latents and without biases.

    Queries that have a latent are computed from an identity matrix instead.
    """
    plain = dataclasses.replace(mechanism, latent_scale=False)
    if isinstance(mechanism, MLAConfig):
        plain = dataclasses.replace(plain, qk_bias=False)
    weights = {name: w for name, w in weights.items() if name not in _BIASES}
    shapes = nnx.eval_shape(lambda: plain.build(d_model, rngs=nnx.Rngs(0)))
    wide = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), weights)
    module = nnx.merge(nnx.split(shapes)[0], wide)
    if has_normed_latent(mechanism):
        module.latent_norm = lambda latent: latent
    if mechanism.query_rank:
        identity_1QQ = jnp.eye(mechanism.query_rank)[None]
        module.query_input = lambda x: identity_1QQ
    return module


def _channels(activation: jax.Array) -> int:
    return math.prod(activation.shape[2:])


def _unit_activations(raw: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns each activation as [1, A, *shape], an identity matrix over the A channels of all.

    Token a is 1 in channel a, counted over all activations, and 0 elsewhere.
    """
    units_AA = np.eye(sum(_channels(x) for x in raw.values()))
    activations, first = {}, 0
    for name, x in raw.items():
        last = first + _channels(x)
        activations[name] = jnp.asarray(units_AA[:, first:last].reshape(1, -1, *x.shape[2:]))
        first = last
    return activations


def _factors_of_rank(
    down_DA: np.ndarray, up_AKX: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns factors with the same product, of `rank` channels: at least the product's rank."""
    if rank == down_DA.shape[1]:
        return down_DA, up_AKX
    heads = up_AKX.shape[1:]
    u_DC, s_C, v_CX = np.linalg.svd(down_DA @ up_AKX.reshape(len(up_AKX), -1), full_matrices=False)
    return u_DC[:, :rank], (s_C[:rank, None] * v_CX[:rank]).reshape(rank, *heads)
