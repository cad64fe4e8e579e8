"""The contract between a mechanism and everything that runs it.

The law: decoding from `encode`'s entry, with `decode_inputs`, equals softmax attention over
`keys_values`, for every mechanism and any split of the tokens.
"""

import dataclasses
import math

from flax import nnx
import jax

from kvjax.cache.field import Field
from kvjax.foundation.configuration import between
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.layers.norm import Norm
from kvjax.layers.rope import Base, Positions, Rotary, rotate
from kvjax.layers.weight import linear, weight

MAX_DIM = 1 << 16  # of heads, and of what one of them has
QK_NORMS = ("none", "rms", "rms_gain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismConfig:
    """Everything about a mechanism that a shape can depend on; each adds keys of its own.

    Each has `key_dim`, channels of a key, H, and `value_dim`, channels of a value, Hv.
    """

    num_heads: int  # query heads, N
    qk_norm: str = "rms"  # norm of queries and keys: "rms", "rms_gain" (a gain learned) or "none"
    bias: bool = False  # on the output only
    norm_epsilon: float = 1e-6  # epsilon of the norms
    # Queries are made of a normed latent of so many channels, Cq; 0: of the layer's input.
    query_rank: int = 0
    latent_scale: bool = False  # normed latents of C channels are multiplied by sqrt(D/C)
    # Every channel of a head's output is multiplied by a sigmoid of the layer's input.
    output_gate: bool = False

    @property
    def title(self) -> str:
        """What reports call it: the field's name, and the size that its cache depends on."""
        return f"{type(self).__name__.removesuffix('Config')}, {self.num_heads} heads"

    @property
    def output_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.bias

    @property
    def rope_dim(self) -> int:
        """Channels rotated by RoPE."""
        return self.key_dim

    @property
    def query_dim(self) -> int:
        """Channels of the query and of the expanded key."""
        return self.key_dim

    @property
    def query_heads(self) -> int:
        """Heads of what `project` returns, each with a softmax; `combine` makes N of them."""
        return self.num_heads

    @property
    def key_heads(self) -> int:
        """Heads of what `keys_values` returns; the cache may have fewer."""
        return self.query_heads

    @property
    def scale(self) -> float:
        """What a logit is multiplied by, 1/sqrt(H) of the key as the mechanism means it."""
        return self.query_dim**-0.5

    @property
    def needs_angles(self) -> bool:
        """Whether logits depend on angles of positions in a model without RoPE too."""
        return False

    @property
    def needs_whole_rows(self) -> bool:
        """Whether what a token sees depends on all tokens of its row, later ones too."""
        return False

    @property
    def absorbed(self) -> tuple[str, ...]:
        """Weights, by attribute of the module, that decoding folds into query and output."""
        return ()

    @property
    def extra_flops(self) -> int:
        """FLOPs of a token's forward pass beyond attention and the use of each weight once."""
        return 0

    @property
    def extra_activations(self) -> int:
        """Elements of products per token that a weight makes beyond its first: head by head."""
        return 0

    def entry(self) -> dict[str, Field]:
        """What the cache keeps per token and layer."""
        raise NotImplementedError

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        """What decoding from the entry costs, in a model with RoPE of that base or without."""
        raise NotImplementedError

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Mechanism":
        """The module that holds the weights."""
        raise NotImplementedError


class Mechanism(nnx.Module):
    """Projections to queries, keys and values, and to what a cache keeps of them.

    `raw` is whatever the mechanism computes once per token from the input: `keys_values` expands
    it, `encode` compresses it. What is named as a field of the entry has that field's axes.
    """

    config: MechanismConfig

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        """q_BTNH, rotated and normalised, and raw."""
        raise NotImplementedError

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        """k_BTKH, rotated and normalised as a whole, and v_BTKHv; K divides the query heads."""
        raise NotImplementedError

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """The cache entry: arrays [B, T, *field.shape], named as in `config.entry()`."""
        raise NotImplementedError

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        """What decode attention needs besides the cache, from `project`'s queries.

        What is folded into weights is float32 or wider: it is not rounded twice.

        Args:
          rope_base: of the model's rotary positions, or None in a model without them.
        """
        raise NotImplementedError

    def combine(self, o_BTNV: jax.Array, positions: Positions) -> jax.Array:
        """[B, T, N, Hv] of what softmax attention makes of the query heads, before the output
        projection; in training and decoding alike.

        Args:
          positions: of the queries.
        """
        del positions
        return o_BTNV

    # -- queries of a rank -------------------------------------------------------------------------

    def query_weight(self, output: str, d_model: int, *, rngs: nnx.Rngs, **sizes: int) -> nnx.Param:
        """A weight from what queries are made of, see `query_input`, to the axes `output`."""
        rank = self.config.query_rank
        letter, width = ("C", rank) if rank else ("D", d_model)
        return weight(f"{letter} -> {output}", rngs, **sizes | {letter: width})

    def add_query_latent(self, d_model: int, *, rngs: nnx.Rngs) -> None:
        """Makes what `query_input` needs; drawn last, where models share what they share."""
        c = self.config
        if c.query_rank:
            self.query_down = weight("D -> C", rngs, D=d_model, C=c.query_rank)
            self.query_latent_norm = latent_norm(c, c.query_rank, "C", rngs=rngs)

    def query_input(self, x_BTD: jax.Array) -> jax.Array:
        """What queries are made of: the input or, where they have a rank, norm(x W) [B, T, Cq]."""
        if not self.config.query_rank:
            return x_BTD
        latent_BTC = self.query_latent_norm(linear(x_BTD, self.query_down[...]))
        return scaled_latent(self.config, latent_BTC, x_BTD.shape[-1])


def require(condition: bool, key: str, value, allowed: str) -> None:
    """Raises a UserError that names the config key, its value and what is allowed."""
    if not condition:
        raise UserError(f"config.attention.{key} = {value}: {allowed}")


def check_common(config: MechanismConfig, *dims: str, has_latent: bool = False) -> None:
    """Raises a UserError for what every mechanism has: heads, dims, norm.

    Args:
      dims: its other keys that are sizes of at least 1.
      has_latent: whether keys or values are made of a normed latent.
    """
    for key in ("num_heads", "key_dim", *dims):
        between(f"config.attention.{key}", getattr(config, key), 1, MAX_DIM)
    between("config.attention.norm_epsilon", config.norm_epsilon, 0.0, 1.0)
    require(
        config.qk_norm in QK_NORMS, "qk_norm", repr(config.qk_norm), f"must be one of {QK_NORMS}"
    )
    between("config.attention.query_rank", config.query_rank, 0, MAX_DIM)
    if config.latent_scale:
        allowed = "has no latent to scale here: give query_rank, or set it to False"
        require(has_latent or config.query_rank > 0, "latent_scale", True, allowed)


def check_divides(config: MechanismConfig, key: str, of: str) -> None:
    """Raises a UserError unless one number of the config, at least 1, divides another."""
    whole, part = getattr(config, of), getattr(config, key)
    between(f"config.attention.{key}", part, 1, MAX_DIM)
    require(whole % part == 0, key, part, f"must divide {of} = {whole}")


def check_residual(config: MechanismConfig, at_rank_0: str, inits: tuple[str, ...]) -> None:
    """Raises a UserError for what residuals of heads have: a rank and a start.

    Args:
      at_rank_0: what the mechanism is without residuals.
      inits: how they may start.
    """
    smaller = min(config.key_dim, config.value_dim)
    allowed = f"must lie in [0, {smaller}], the smaller of key_dim and value_dim (0 is {at_rank_0})"
    require(0 <= config.rank <= smaller, "rank", config.rank, allowed)
    init = config.residual_init
    require(init in inits, "residual_init", repr(init), f"must be one of {inits}")


def check_convertible(config: MechanismConfig, allowed: str) -> None:
    """Raises a UserError for what formats and conversions of published models do not know."""
    for key in ("query_rank", "latent_scale", "output_gate"):
        value = getattr(config, key)
        require(not value, key, value, allowed)


def head_norm(dim: int, qk_norm: str, *, epsilon: float, rngs: nnx.Rngs) -> Norm | None:
    """The norm of a query or key head, or None."""
    if qk_norm == "none":
        return None
    gain = qk_norm == "rms_gain"
    return Norm(dim, kind="rms", gain=gain, bias=False, epsilon=epsilon, rngs=rngs, axes="H")


def latent_norm(
    config: MechanismConfig, dim: int | tuple[int, ...], axes: str, *, rngs: nnx.Rngs
) -> Norm:
    """The norm of a latent, which there always is; with gains where heads have them."""
    options = dict(gain=config.qk_norm == "rms_gain", epsilon=config.norm_epsilon)
    return Norm(dim, kind="rms", bias=False, **options, axes=axes, rngs=rngs)


def scaled_latent(config: MechanismConfig, latent_BTC: jax.Array, d_model: int) -> jax.Array:
    """A normed latent, by sqrt(D/C) if so configured: as long as the input (MLRA's alpha)."""
    if not config.latent_scale:
        return latent_BTC
    return latent_BTC * math.sqrt(d_model / latent_BTC.shape[-1])


def normalise_and_rotate(x_BTNH: jax.Array, norm: Norm | None, rotary: Rotary | None) -> jax.Array:
    """QK-norm, then RoPE. Without a gain the two commute; with one (Qwen3) this is the order."""
    if norm is not None:
        x_BTNH = norm(x_BTNH)
    return x_BTNH if rotary is None else rotate(x_BTNH, rotary)


def gain_of(norm: Norm | None) -> jax.Array | None:
    """[H] gain of a head norm, or None."""
    return None if norm is None or norm.gain is None else norm.gain[...]
