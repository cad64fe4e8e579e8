"""The contract between a mechanism and everything that runs it.

The law: decoding from `encode`'s entry, with `decode_inputs`, equals softmax attention over
`keys_values`, for every mechanism and any split of the tokens.
"""

from typing import Protocol

from flax import nnx
import jax

from kvjax.cache.field import Field
from kvjax.foundation.configuration import between
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention.readings import DecodeFlops
from kvjax.kernels.decode_attention.readings import Reading
from kvjax.layers.norm import Norm
from kvjax.layers.rope import Base
from kvjax.layers.rope import Positions
from kvjax.layers.rope import Rotary
from kvjax.layers.rope import rotate

MAX_DIM = 1 << 16  # of heads, and of what one of them has
QK_NORMS = ("none", "rms", "rms_gain")


class MechanismConfig(Protocol):
    """A small frozen dataclass: everything about the mechanism that a shape can depend on."""

    num_heads: int  # N
    qk_norm: str  # "none", "rms", or "rms_gain" (a learned gain per channel)
    norm_epsilon: float

    @property
    def output_bias(self) -> bool:
        """Whether the output projection has a bias."""

    @property
    def rope_dim(self) -> int:
        """Channels rotated by RoPE."""

    @property
    def query_dim(self) -> int:
        """Channels of the query and of the expanded key."""

    @property
    def key_heads(self) -> int:
        """Heads of what `keys_values` returns; the cache may have fewer."""

    @property
    def scale(self) -> float:
        """What a logit is multiplied by, 1/sqrt(H) of the key as the mechanism means it."""

    @property
    def value_dim(self) -> int:
        """Hv of the expanded value."""

    @property
    def needs_angles(self) -> bool:
        """Whether logits depend on angles of positions in a model without RoPE too."""

    def entry(self) -> dict[str, Field]:
        """What the cache keeps per token and layer."""

    @property
    def absorbed(self) -> tuple[str, ...]:
        """Weights, by attribute of the module, that decoding folds into query and output."""

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        """What decoding from the entry costs, in a model with RoPE of that base or without."""

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Mechanism":
        """The module that holds the weights."""


class Mechanism(Protocol):
    """Projections to queries, keys and values, and to what a cache keeps of them.

    `raw` is whatever the mechanism computes once per token from the input: `keys_values` expands
    it, `encode` compresses it. What is named as a field of the entry has that field's axes.
    """

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        """q_BTNH, rotated and normalised, and raw."""

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        """k_BTKH, rotated and normalised as a whole, and v_BTKHv; K divides N."""

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """The cache entry: arrays [B, T, *field.shape], named as in `config.entry()`."""

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> Reading:
        """What decode attention needs besides the cache, from `project`'s queries.

        What is folded into weights is float32 or wider: it is not rounded twice.

        Args:
          rope_base: of the model's rotary positions, or None in a model without them.
        """


def require(condition: bool, key: str, value, allowed: str) -> None:
    """Raises a UserError that names the config key, its value and what is allowed."""
    if not condition:
        raise UserError(f"config.attention.{key} = {value}: {allowed}")


def check_common(config: MechanismConfig, *dims: str) -> None:
    """Raises a UserError for what every mechanism has: heads, dims, norm.

    Args:
      dims: its keys that are sizes of at least 1.
    """
    for key in ("num_heads", *dims):
        between(f"config.attention.{key}", getattr(config, key), 1, MAX_DIM)
    between("config.attention.norm_epsilon", config.norm_epsilon, 0.0, 1.0)
    require(
        config.qk_norm in QK_NORMS, "qk_norm", repr(config.qk_norm), f"must be one of {QK_NORMS}"
    )


def head_norm(dim: int, qk_norm: str, *, epsilon: float, rngs: nnx.Rngs) -> Norm | None:
    """The norm of a query or key head, or None."""
    if qk_norm == "none":
        return None
    gain = qk_norm == "rms_gain"
    return Norm(dim, kind="rms", gain=gain, bias=False, epsilon=epsilon, rngs=rngs, axis="H")


def normalise_and_rotate(x_BTNH: jax.Array, norm: Norm | None, rotary: Rotary | None) -> jax.Array:
    """QK-norm, then RoPE. Without a gain the two commute; with one (Qwen3) this is the order."""
    if norm is not None:
        x_BTNH = norm(x_BTNH)
    return x_BTNH if rotary is None else rotate(x_BTNH, rotary)


def gain_of(norm: Norm | None) -> jax.Array | None:
    """[H] gain of a head norm, or None."""
    return None if norm is None or norm.gain is None else norm.gain[...]
