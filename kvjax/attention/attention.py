"""The attention module of every model: a mechanism, softmax attention, an output projection.

            q, raw = project(x)
training    k, v = keys_values(raw)                o = softmax_attention(q, k, v)
decoding    cache = append(cache, encode(raw))     o = decode_attention(decode_inputs(q), cache)
            y = (combine(o) * sigmoid(x W_gate)) W_out       the gate is optional
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import canonical
from kvjax.attention.mechanism import MechanismConfig
from kvjax.cache import append
from kvjax.cache.field import Field
from kvjax.distributed.sharding import BATCH, constrain
from kvjax.kernels.decode_attention.api import decode_attention
from kvjax.kernels.softmax_attention.api import softmax_attention, sort_tokens
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import linear, weight


class Attention(nnx.Module):
    """Softmax attention [B, T, D] -> [B, T, D] over the keys and values of a mechanism.

    Attributes:
      spreads_keys: True: decoding caches keys in the basis of `canonical.spread_keys`.
    """

    spreads_keys = False

    def __init__(self, config: MechanismConfig, d_model: int, *, rngs: nnx.Rngs):
        sizes = dict(N=config.num_heads, H=config.value_dim, D=d_model)
        self.out = weight("N H -> D", rngs, init="output", **sizes)
        self.out_bias = weight("D", rngs, init="zeros", D=d_model) if config.output_bias else None
        self.mechanism = config.build(d_model, rngs=rngs)
        self.gate = weight("D -> N H", rngs, **sizes) if config.output_gate else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        *,
        causal: bool,
        window: int = 0,
        logit_factor: float = 1.0,
        softcap: float = 0.0,
        segment_ids_BS: jax.Array | None = None,
        mesh: jax.sharding.Mesh | None = None,
        temperature: jax.Array | None = None,
        **options,
    ) -> jax.Array:
        """Applies self-attention to whole rows (training).

        Args:
          positions: positions of the tokens in storage order. With context parallelism the storage
            order is a permutation of the row, the same for all rows.
          mesh: mesh of several devices. If rows are sharded over `sequence`, the devices exchange
            `raw` (bases and latents, computed once per token), and each expands it to keys and
            values. For LRKV with 36 layers, `raw` has 0.56 times the bytes of keys and values.
          segment_ids_BS: segment ids in the order of positions, not in storage order.
          temperature: scalar array that logits are divided by; None: 1.
          logit_factor: number that logits are multiplied by, besides the mechanism's scale.
          window, softcap, options: see `softmax_attention`.
        """
        q_BTNH, raw = self.mechanism.project(x_BTD, positions)
        if segment_ids_BS is not None and self.mechanism.config.needs_whole_rows:
            raise ValueError("segment_ids_BS: this attention depends on all tokens of a row")
        if temperature is not None:
            q_BTNH = q_BTNH / temperature.astype(q_BTNH.dtype)
        key_positions = positions
        if mesh is not None and mesh.shape["sequence"] > 1:
            order_T = np.asarray(positions.index)[0]
            options["query_positions_T"] = order_T
            if segment_ids_BS is not None:
                options["query_segment_ids_BT"] = segment_ids_BS[:, order_T]
            with jax.named_scope("latents"):
                fields = self.mechanism.config.entry()
                raw = {
                    name: _copy_to_sequence_devices(x, fields.get(name), order_T, mesh)
                    for name, x in raw.items()
                }
            key_positions = jax.tree.map(lambda a: a[:, np.argsort(order_T)], positions)
        k_BTKH, v_BTKH = self.mechanism.keys_values(raw, key_positions)
        o_BTNH = softmax_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            scale=self.mechanism.config.scale * logit_factor,
            causal=causal,
            window=window,
            softcap=softcap,
            segment_ids_BS=segment_ids_BS,
            mesh=mesh,
            **options,
        )
        return self.project_out(o_BTNH, x_BTD, positions)

    def decode(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        layer: dict[str, jax.Array],
        counts_B: jax.Array,
        **options,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Appends T new tokens to a layer's cache, attends to all of it, and projects the outputs.

        Args and returns: as of `attend`, but the output is [B, T, D].
        """
        o_BTNH, layer = self.attend(x_BTD, positions, layer, counts_B, **options)
        return project_heads(o_BTNH, self.out, self.out_bias), layer

    def attend(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        layer: dict[str, jax.Array],
        counts_B: jax.Array,
        *,
        rope_base: Base | None,
        window: int = 0,
        logit_factor: float = 1.0,
        softcap: float = 0.0,
        implementation: str | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Appends T new tokens to a layer's cache and attends to all of it.

        Args:
          positions: positions of the new tokens, which continue each sequence's cached tokens.
          layer: one layer of a `kvjax.cache.Cache`.
          counts_B: number of real tokens among the T; the rest is padding at the end.
          logit_factor: see `__call__`.
          window, softcap, implementation: see `decode_attention`.

        Returns:
          The heads' outputs before their projection, [B, T, N, Hv], and the updated layer.
        """
        options = dict(window=window, softcap=softcap, implementation=implementation)
        first_B = positions.index[:, 0]
        new = (x_BTD, positions, layer, counts_B)
        prepared = self.mechanism.prepare(*new, rope_base=rope_base, **options)
        if prepared is not None:
            inputs, layer = prepared
        else:
            q_BTNH, raw = self.mechanism.project(x_BTD, positions)
            entry = self.mechanism.encode(raw, positions)
            inputs = self.mechanism.decode_inputs(q_BTNH, rope_base)
            if self.spreads_keys:
                entry, inputs = canonical.spread_keys(self.mechanism.config, entry, inputs)
            layer = append(layer, entry, first_B, counts_B)
        inputs = dataclasses.replace(inputs, scale=inputs.scale * logit_factor)
        o_BTNH = decode_attention(inputs, layer, first_B, **options)
        return self._combine(o_BTNH.astype(x_BTD.dtype), x_BTD, positions), layer

    def project_out(self, o_BTNH: jax.Array, x_BTD: jax.Array, positions: Positions) -> jax.Array:
        """Combines, gates and projects the outputs of softmax attention: [B, T, D].

        Args:
          x_BTD: the layer's input, for the gate.
          positions: positions of the queries.
        """
        return project_heads(self._combine(o_BTNH, x_BTD, positions), self.out, self.out_bias)

    def _combine(self, o_BTNH: jax.Array, x_BTD: jax.Array, positions: Positions) -> jax.Array:
        o_BTNH = self.mechanism.combine(o_BTNH, positions)
        if self.gate is not None:
            o_BTNH = o_BTNH * jax.nn.sigmoid(linear(x_BTD, self.gate[...]))
        return o_BTNH


def project_heads(o_BTNH: jax.Array, out: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    """Applies an output projection of axes "N H -> D": [B, T, D]."""
    B, T, N, Hv = o_BTNH.shape
    y_BTD = linear(o_BTNH.reshape(B, T, N * Hv), out[...].reshape(N * Hv, -1))
    return y_BTD if bias is None else y_BTD + bias[...][None, None]


def _copy_to_sequence_devices(
    x_BT: jax.Array, field: Field | None, order_T: np.ndarray, mesh: jax.sharding.Mesh
) -> jax.Array:
    """Copies whole rows, sorted by position, to each device along `sequence`: [sequence·B, T, ..].

    The copies are slices of a longer batch axis, not one replicated array. Each device's keys and
    values then depend on its own copy, so the backward pass sums the gradients of latents over
    devices, instead of the larger gradients of expanded keys and values.
    """
    # Heads are sharded over `tensor`; a single base, or a field without heads, is replicated.
    heads = ()
    if field is not None and (field.heads or 1) > 1:
        heads = (*[None] * field.head_axis, "tensor")
    # Without this constraint the compiler gathers the projection's input, which is larger.
    x_BT = constrain(x_BT, mesh, BATCH, "sequence", *heads)
    x_BT = sort_tokens(order_T, constrain(x_BT, mesh, BATCH, None, *heads))
    x_CBT = jnp.broadcast_to(x_BT[None], (mesh.shape["sequence"], *x_BT.shape))
    x_CBT = constrain(x_CBT, mesh, "sequence", BATCH, None, *heads)
    x_CBT = x_CBT.reshape(-1, *x_BT.shape[1:])
    return constrain(x_CBT, mesh, ("sequence", *BATCH), None, *heads)
