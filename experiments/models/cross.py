"""Cross-attention: queries from x, keys and values from a memory m, without positions.

    K_n = m W_K + (m U^K_n) B^K_n      V_n = m W_V + (m U^V_n) B^V_n      q_n = x W^Q_n

Mechanisms are those of `grouped.py`: MHA, GQA, MQA, thin keys, and LRKV, whose cross-attention the
paper proposes for future work (section 7). A memory is encoded once, and every query attends to the
whole memory.

Cache of LRKV per memory token: 2(H + N·R) elements, and N float32 values of 1/rms if keys are
normalised. Without RoPE, LRKV's eq. 3 and 4 hold as written, except for the factor 1/rms.
"""

from collections.abc import Mapping

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.attention import project_heads
from kvjax.attention.grouped import Grouped, GroupedConfig
from kvjax.attention.mechanism import require
from kvjax.cache import append
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention import api
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.kernels.softmax_attention.api import softmax_attention
from kvjax.layers.rope import Positions
from kvjax.layers.weight import weight

_NOWHERE = Positions(None, None)  # neither queries nor keys have positions


def check(config: GroupedConfig) -> None:
    """Raises a UserError for settings that cross-attention cannot have."""
    if not isinstance(config, GroupedConfig):
        raise UserError(
            f"cross-attention by {type(config).__name__}: must be a GroupedConfig (LRKV, MHA, GQA, "
            "MQA, tied values), which alone has a form for two streams"
        )
    ties = "must be 'none' or 'kv' in cross-attention: queries come from another stream"
    require(not config.ties_queries, "tie", repr(config.tie), ties)
    fixed = dict(rope="full", position_channels=0, alibi=False, output_gate=False)
    for key, value in fixed.items():
        setting = getattr(config, key)
        require(setting == value, key, repr(setting), f"must be {value!r} in cross-attention")


class CrossAttention(nnx.Module):
    """Attention of x [B, T, D] over memories [B, S, Dm] with lengths [B].

    Memory tokens beyond the length have no effect, even if they are NaN.
    """

    def __init__(
        self, config: GroupedConfig, d_model: int, memory_width: int = 0, *, rngs: nnx.Rngs
    ):
        """Creates the weights.

        Args:
          memory_width: Dm; 0: d_model.
        """
        check(config)
        sizes = dict(N=config.num_heads, H=config.value_dim, D=d_model)
        self.out = weight("N H -> D", rngs, init="output", **sizes)
        self.out_bias = weight("D", rngs, init="zeros", D=d_model) if config.output_bias else None
        width = memory_width or d_model
        self.mechanism = Grouped(config, width, query_width=d_model, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, lengths_B: jax.Array, **options
    ) -> jax.Array:
        """Applies attention over expanded keys and values, as in training.

        Args:
          lengths_B: int32 [B], tokens of each memory, at least 1.
          options: see `softmax_attention`.
        """
        (B, T), S = x_BTD.shape[:2], memory_BSD.shape[1]
        raw = self.mechanism.raw(_cut(memory_BSD, lengths_B))
        k_BSKH, v_BSKH = self.mechanism.keys_values(raw, _NOWHERE)
        behind_BS = jnp.arange(S, dtype=jnp.int32)[None] >= lengths_B[:, None]
        o_BTNH = softmax_attention(
            self.mechanism.queries(x_BTD, raw, _NOWHERE),
            k_BSKH,
            v_BSKH,
            scale=self.mechanism.config.scale,
            causal=False,
            segment_ids_BS=behind_BS.astype(jnp.int32),
            query_segment_ids_BT=jnp.zeros((B, T), jnp.int32),
            **options,
        )
        return project_heads(o_BTNH, self.out, self.out_bias)

    def encode(self, memory_BSD: jax.Array, lengths_B: jax.Array, layer: dict) -> dict:
        """Returns a cache layer with the entries of memories [B, S, Dm].

        Args:
          layer: empty arrays [B, *shape, capacity] from `cache.allocate`.
        """
        entry = self.mechanism.encode(self.mechanism.raw(_cut(memory_BSD, lengths_B)), _NOWHERE)
        return append(layer, entry, jnp.zeros_like(lengths_B), lengths_B)

    def decode(
        self,
        x_BTD: jax.Array,
        layer: dict[str, jax.Array],
        lengths_B: jax.Array,
        *,
        implementation: str | None = None,
    ) -> jax.Array:
        """Applies attention over the cached entries; equals the training pass.

        Args:
          implementation: see `memory_attention`.
        """
        q_BTNH = self.mechanism.queries(x_BTD, {}, _NOWHERE)
        inputs = self.mechanism.decode_inputs(q_BTNH, None)
        o_BTNH = memory_attention(inputs, layer, lengths_B, implementation=implementation)
        return project_heads(o_BTNH.astype(x_BTD.dtype), self.out, self.out_bias)


def _cut(memory_BSD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Sets memory tokens beyond each length to zero; they may be NaN."""
    inside_BS = jnp.arange(memory_BSD.shape[1], dtype=jnp.int32)[None] < lengths_B[:, None]
    return jnp.where(inside_BS[..., None], memory_BSD, jnp.zeros((), memory_BSD.dtype))


def memory_attention(
    inputs: DecodeInputs,
    cache: Mapping[str, jax.Array],
    lengths_B: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Applies attention of T queries per sequence over a whole memory: [B, T, N, Hv].

    One query per sequence is `decode_attention` at the memory's last token, which the kernels
    implement. Several queries need "xla" or "reference", without a causal mask.

    Args:
      cache: arrays [B, *shape, S], finite beyond a memory's length.
      lengths_B: [B] tokens of each memory; the output of an empty memory is 0.

    Raises:
      NotImplementedError: several queries with a kernel.
    """
    last_B = jnp.maximum(lengths_B - 1, 0)
    if inputs.query.shape[1] == 1:
        o_BTNH = api.decode_attention(inputs, cache, last_B, implementation=implementation)
    else:
        name = implementation or "xla"
        if api.is_kernel(name):
            raise NotImplementedError(
                f"implementation = {name!r}: several queries over a whole memory are for 'xla' and "
                "'reference'"
            )
        o_BTNH = api.IMPLEMENTATIONS[name](inputs, cache, last_B, causal=False)
    return jnp.where((lengths_B > 0)[:, None, None, None], o_BTNH, 0)
