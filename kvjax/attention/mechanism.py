"""The contract between a mechanism and everything that runs it.

The law: decoding from `encode`'s entry equals softmax attention over `keys_values`, for every
mechanism and any split of the tokens.
"""

from typing import NamedTuple
from typing import Protocol

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.errors import UserError
from kvjax.layers.norm import Norm
from kvjax.layers.rope import Rotary
from kvjax.layers.rope import rotate

QK_NORMS = ("none", "rms", "rms_gain")


class Field(NamedTuple):
    """One array of a cache entry: its shape per token, and its dtype (None: the compute dtype)."""

    shape: tuple[int, ...]
    dtype: jnp.dtype | None = None


class MechanismConfig(Protocol):
    """A small frozen dataclass: everything about the mechanism that a shape can depend on."""

    num_heads: int  # N
    qk_norm: str  # "none", "rms", or "rms_gain" (a learned gain per channel)
    bias: bool

    @property
    def rope_dim(self) -> int:
        """Channels rotated by RoPE."""

    @property
    def query_dim(self) -> int:
        """H of the query and of the expanded key; logits are scaled by 1/sqrt(H)."""

    @property
    def value_dim(self) -> int:
        """Hv of the expanded value."""

    def entry(self) -> dict[str, Field]:
        """What the cache keeps per token and layer."""

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Mechanism":
        """The module that holds the weights."""


class Mechanism(Protocol):
    """Projections to queries, keys and values, and to what a cache keeps of them.

    `rotary` is None in a model without RoPE. `raw` is whatever the mechanism computes once per
    token from the input: `keys_values` expands it, `encode` compresses it.
    """

    def project(self, x_BTD: jax.Array, rotary: Rotary | None) -> tuple[jax.Array, dict]:
        """q_BTNH, rotated and normalised, and raw."""

    def keys_values(self, raw: dict, rotary: Rotary | None) -> tuple[jax.Array, jax.Array]:
        """k_BTKH, rotated and normalised as a whole, and v_BTKHv; K divides N."""

    def encode(self, raw: dict, rotary: Rotary | None) -> dict[str, jax.Array]:
        """The cache entry: arrays [B, T, *field.shape], named as in `config.entry()`."""


def require(condition: bool, key: str, value, allowed: str) -> None:
    """Raises a UserError that names the config key, its value and what is allowed."""
    if not condition:
        raise UserError(f"config.attention.{key} = {value}: {allowed}")


def check_common(config: MechanismConfig) -> None:
    require(config.num_heads >= 1, "num_heads", config.num_heads, "must be at least 1")
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
