"""The interface of a mechanism: `MechanismConfig` (sizes, cache entry) and `Mechanism` (weights).

The law that every mechanism satisfies (tests/attention/law.py): decode attention over the entries
of `encode` with `decode_inputs` equals softmax attention over `keys_values`, for any division of
the tokens into prefill and decode steps.
"""

import dataclasses
import functools
import logging
import math

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.cache.field import Field
from kvjax.foundation.configuration import between, one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.logs import log_once
from kvjax.kernels.decode_attention import api
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.layers.norm import Norm
from kvjax.layers.rope import Base, Positions, Rotary, rotate
from kvjax.layers.weight import add_bias, affine, linear, weight

MAX_DIM = 1 << 16  # largest number of heads, channels or ranks that a config may have
QK_NORMS = ("none", "rms", "rms_gain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismConfig:
    """Keys that every mechanism has, and the properties that other packages read.

    Subclasses add their own keys, among them `key_dim` (channels of a key, H) and `value_dim`
    (channels of a value, Hv), as keys or as properties.
    """

    num_heads: int  # query heads, N
    qk_norm: str = "rms"  # norm of queries and keys: "rms", "rms_gain" (with learned gain), "none"
    bias: bool = False  # bias of the output projection
    norm_epsilon: float = 1e-6  # epsilon of the norms
    query_rank: int = 0  # low-rank queries, from a normed latent of Cq channels; 0: full rank
    latent_scale: bool = False  # normed latents of C channels are multiplied by sqrt(D/C)
    output_gate: bool = False  # heads' outputs are multiplied by sigmoid(x W), per channel

    @property
    def title(self) -> str:
        """Name in reports: the mechanism and the size that determines its cache."""
        return f"{type(self).__name__.removesuffix('Config')}, {self.num_heads} heads"

    @property
    def output_bias(self) -> bool:
        """True if the output projection has a bias."""
        return self.bias and getattr(self, "out_bias", True)

    @property
    def rope_dim(self) -> int:
        """Number of channels that RoPE rotates: a separate RoPE key's, else all of a key's."""
        return getattr(self, "rope_key_dim", self.key_dim)

    @property
    def query_dim(self) -> int:
        """Channels of the query and of the expanded key."""
        return self.key_dim

    @property
    def rotated_channels(self) -> slice:
        """The channels of the query and of the expanded key that RoPE rotates: the last."""
        return slice(self.query_dim - self.rope_dim, self.query_dim)

    @property
    def query_heads(self) -> int:
        """Number of heads of `project`'s queries; `combine` reduces their outputs to N heads."""
        return self.num_heads

    @property
    def key_heads(self) -> int:
        """Number of heads of expanded keys and values; the cache may have fewer."""
        return getattr(self, "num_kv_heads", self.query_heads)

    @property
    def scale(self) -> float:
        """Factor on the logits, usually 1/sqrt(channels of the expanded key)."""
        return self.query_dim**-0.5

    @property
    def needs_angles(self) -> bool:
        """True if logits depend on positions even in a model without RoPE."""
        return False

    @property
    def needs_whole_rows(self) -> bool:
        """True if attention weights depend on all tokens of the row, later ones included."""
        return False

    @property
    def absorbed(self) -> tuple[str, ...]:
        """Attributes of the module's weights that decoding absorbs into queries and outputs."""
        return ()

    @property
    def extra_flops(self) -> int:
        """FLOPs per token of a forward pass beyond attention and one product with each weight."""
        return 0

    @property
    def extra_activations(self) -> int:
        """Activations per token beyond one output per weight: those of weights applied per head."""
        return 0

    def entry(self) -> dict[str, Field]:
        """Returns the fields that the cache stores per token and layer."""
        raise NotImplementedError

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        """Returns the FLOPs of decode attention per query and per key; rope_base None: no RoPE."""
        raise NotImplementedError

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Mechanism":
        """Creates the module with the weights."""
        raise NotImplementedError


class Mechanism(nnx.Module):
    """Projections to queries, keys and values, and to cache entries.

    `raw` holds the activations that the mechanism computes once per token from the input (bases,
    latents); `keys_values` expands them, `encode` turns them into a cache entry. An array of `raw`
    that has the name of a field must have its shape: over `sequence` it is sharded like the field.
    """

    config: MechanismConfig
    packable: tuple[str, ...] = ()  # weights that `pack` merges; only `product` may read them
    packed_columns = ()  # after `pack`: (weight, its first column, its output dims)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        """Returns queries q_BTNH, normed and rotated, and raw."""
        raise NotImplementedError

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        """Returns k_BTKH, normed and rotated, and v_BTKHv; both have `key_heads` heads."""
        raise NotImplementedError

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """Returns the cache entry: arrays [B, T, *field.shape], named as in `config.entry()`."""
        return dict(raw)

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        """Returns the decode inputs for the queries of `project`.

        Queries with absorbed weights are at least float32, so that they are not rounded twice.

        Args:
          rope_base: frequencies of the model's RoPE; None: no RoPE.
        """
        raise NotImplementedError

    def prepare(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        layer: dict[str, jax.Array],
        counts_B: jax.Array,
        *,
        rope_base: Base | None,
        **options,
    ) -> tuple[DecodeInputs, dict[str, jax.Array]] | None:
        """Projects, encodes and appends new tokens in one kernel; None if no kernel takes them.

        Args:
          layer, counts_B, rope_base: as in `Attention.decode`.
          options: window, softcap and implementation of `decode_attention`.

        Returns:
          The decode inputs and the updated layer.
        """
        del x_BTD, positions, layer, counts_B, rope_base, options
        return None

    def gpu_inputs(
        self, x_BTD: jax.Array, layer: dict[str, jax.Array], rope_base: Base | None, **options
    ) -> DecodeInputs | None:
        """Returns decode inputs as shapes, for `prepare` of a GPU kernel that takes one token.

        Or None: there are several tokens, or another implementation is chosen. The choice depends
        on the queries' shape alone; the kernel projects them.
        """
        c, (B, T, _) = self.config, x_BTD.shape
        if T > 1:
            return None
        query = jax.ShapeDtypeStruct((B, T, c.num_heads, c.query_dim), x_BTD.dtype)
        inputs = jax.eval_shape(functools.partial(self.decode_inputs, rope_base=rope_base), query)
        return inputs if api.chosen(inputs, layer, **options) == "gpu" else None

    def combine(self, o_BTNV: jax.Array, positions: Positions) -> jax.Array:
        """Maps outputs of softmax attention [B, T, query_heads, V] to [B, T, N, Hv].

        Applied before the gate and the output projection, in training and decoding.

        Args:
          positions: positions of the queries.
        """
        del positions
        return o_BTNV

    # -- products with the input -------------------------------------------------------------------

    def product(self, x_BTD: jax.Array, name: str) -> jax.Array:
        """Returns the product of the input with the weight `name`, plus its bias, if any."""
        bias = getattr(self, f"{name}_bias", None)
        for packed_name, begin, dims in self.packed_columns:
            if packed_name == name:
                # The same product for every name: XLA computes it once.
                y_BTE = linear(x_BTD, self.packed[...])
                y_BTE = y_BTE[..., begin : begin + math.prod(dims)]
                return add_bias(y_BTE.reshape(*y_BTE.shape[:-1], *dims), bias)
        return affine(x_BTD, getattr(self, name), bias)

    def pack(self) -> None:
        """Replaces the `packable` weights by one matrix `packed`, for decoding.

        XLA on a GPU merges products with several matrices into one, but concatenates the matrices
        again in every step (22 MB per layer of LRKV at d36).
        """
        params = {name: getattr(self, name, None) for name in self.packable}
        # Only weights applied to the input: low-rank queries are projected from a latent.
        params = {n: p for n, p in params.items() if p is not None and p.axes.startswith("D ->")}
        if not params:
            return
        matrices, columns, begin = [], [], 0
        for name, param in params.items():
            matrices.append(param[...].reshape(param.shape[0], -1))
            columns.append((name, begin, param.shape[1:]))
            begin += matrices[-1].shape[1]
            setattr(self, name, None)
        self.packed = nnx.Param(jnp.concatenate(matrices, axis=1))
        self.packed_columns = tuple(columns)

    # -- low-rank queries --------------------------------------------------------------------------

    def query_weight(self, output: str, d_model: int, *, rngs: nnx.Rngs, **sizes: int) -> nnx.Param:
        """Creates a weight from `query_input` to the axes `output`."""
        rank = self.config.query_rank
        letter, width = ("C", rank) if rank else ("D", d_model)
        return weight(f"{letter} -> {output}", rngs, **sizes | {letter: width})

    def add_query_latent(self, d_model: int, *, rngs: nnx.Rngs) -> None:
        """Creates the query down-projection, if configured.

        Called last in a module's __init__, so that models of equal seed share their other weights.
        """
        c = self.config
        if c.query_rank:
            self.query_down = weight("D -> C", rngs, D=d_model, C=c.query_rank)
            self.query_latent_norm = latent_norm(c, c.query_rank, "C", rngs=rngs)

    def query_input(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the query projection's input: x or, with query_rank, norm(x W) [B, T, Cq]."""
        if not self.config.query_rank:
            return x_BTD
        latent_BTC = self.query_latent_norm(self.product(x_BTD, "query_down"))
        return scaled_latent(self.config, latent_BTC, x_BTD.shape[-1])


def log_unprepared(reason: str) -> None:
    """Logs once why a mechanism's `prepare` leaves new tokens to XLA."""
    message = f"decode attention: the GPU kernel that appends a token {reason}: XLA does"
    log_once(__name__, logging.INFO, message)


def require(condition: bool, key: str, value, allowed: str) -> None:
    """Raises a UserError with key, value and allowed values, unless the condition holds."""
    if not condition:
        raise UserError(f"config.attention.{key} = {value}: {allowed}")


def check_common(
    config: MechanismConfig,
    *dims: str,
    has_latent: bool = False,
    qk_norms: tuple[str, ...] = QK_NORMS,
) -> None:
    """Raises a UserError for bad values of the keys that every mechanism has.

    Args:
      dims: further keys that are sizes of at least 1.
      has_latent: keys or values come from a normed latent.
      qk_norms: values of qk_norm.
    """
    for key in ("num_heads", "key_dim", *dims):
        between(f"config.attention.{key}", getattr(config, key), 1, MAX_DIM)
    between("config.attention.norm_epsilon", config.norm_epsilon, 0.0, 1.0)
    one_of("config.attention.qk_norm", config.qk_norm, qk_norms)
    between("config.attention.query_rank", config.query_rank, 0, MAX_DIM)
    if config.latent_scale:
        allowed = "there is no normed latent to scale: set query_rank, or latent_scale = False"
        require(has_latent or config.query_rank > 0, "latent_scale", True, allowed)


def check_divides(config: MechanismConfig, divisor_key: str, dividend_key: str) -> None:
    """Raises a UserError unless one key's value is at least 1 and divides the other's."""
    divisor, dividend = getattr(config, divisor_key), getattr(config, dividend_key)
    between(f"config.attention.{divisor_key}", divisor, 1, MAX_DIM)
    allowed = f"must divide {dividend_key} = {dividend}"
    require(dividend % divisor == 0, divisor_key, divisor, allowed)


def check_residual(config: MechanismConfig, rank_0_name: str, inits: tuple[str, ...]) -> None:
    """Raises a UserError for a bad rank or initialisation of residuals.

    Args:
      rank_0_name: name of the mechanism without residuals.
      inits: allowed values of residual_init.
    """
    most = min(config.key_dim, config.value_dim)
    allowed = f"must lie in [0, {most}], the smaller of key_dim and value_dim (0 is {rank_0_name})"
    require(0 <= config.rank <= most, "rank", config.rank, allowed)
    one_of("config.attention.residual_init", config.residual_init, inits)


def check_convertible(config: MechanismConfig, allowed: str) -> None:
    """Raises a UserError for options that conversion and export do not support.

    Args:
      allowed: end of the message: what is allowed.
    """
    for key in ("query_rank", "latent_scale", "output_gate"):
        value = getattr(config, key)
        require(not value, key, value, allowed)


def head_norm(config: MechanismConfig, dim: int, *, rngs: nnx.Rngs) -> Norm | None:
    """Creates the norm of query or key heads; None if qk_norm is "none"."""
    return None if config.qk_norm == "none" else latent_norm(config, dim, "H", rngs=rngs)


def whole_norm(config: MechanismConfig, heads: int, letter: str, *, rngs: nnx.Rngs) -> Norm:
    """Creates the norm, with gains, of all heads' channels together, as in OLMo 2."""
    dims, options = (heads, config.key_dim), dict(kind="rms", gain=True, bias=False, whole=True)
    return Norm(dims, axes=f"{letter} H", epsilon=config.norm_epsilon, **options, rngs=rngs)


def latent_norm(
    config: MechanismConfig, dim: int | tuple[int, ...], axes: str, *, rngs: nnx.Rngs
) -> Norm:
    """Creates the norm of a latent; unlike `head_norm` it exists for every qk_norm."""
    offset = config.qk_norm == "rms_offset"
    gain = offset or config.qk_norm == "rms_gain"
    options = dict(kind="rms", gain=gain, offset=offset, bias=False, epsilon=config.norm_epsilon)
    return Norm(dim, axes=axes, **options, rngs=rngs)


def scaled_latent(config: MechanismConfig, latent_BTC: jax.Array, d_model: int) -> jax.Array:
    """Multiplies a normed latent by sqrt(D/C), if configured (MLRA's alpha)."""
    if not config.latent_scale:
        return latent_BTC
    return latent_BTC * math.sqrt(d_model / latent_BTC.shape[-1])


def normalise_and_rotate(x_BTNH: jax.Array, norm: Norm | None, rotary: Rotary | None) -> jax.Array:
    """Applies QK-norm, then RoPE. They commute without a gain; with one, this is Qwen3's order."""
    if norm is not None:
        x_BTNH = norm(x_BTNH)
    return x_BTNH if rotary is None else rotate(x_BTNH, rotary)


def gain_of(norm: Norm | None) -> jax.Array | None:
    """Returns the gain [H] of a head norm, or None."""
    return None if norm is None or norm.gain is None else norm.gain[...]


def times_gain(x: jax.Array, gain_H: jax.Array | None) -> jax.Array:
    """Multiplies the last axis by the gain of a head norm, if there is one."""
    return x if gain_H is None else x * gain_H.reshape((1,) * (x.ndim - 1) + (-1,))
