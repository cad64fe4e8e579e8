"""The attention module: a mechanism, softmax attention, an output projection.

Training's softmax attention is a library's, over expanded keys and values; `decode` reads a cache.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention.mechanism import MechanismConfig
from kvjax.cache import append
from kvjax.cache.field import Field
from kvjax.distributed.sharding import BATCH, constrain
from kvjax.kernels.decode_attention.api import decode_attention
from kvjax.kernels.softmax_attention.api import softmax_attention, sort_tokens
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import linear, weight


class Attention(nnx.Module):
    """Softmax attention [B, T, D] -> [B, T, D] with the keys and values of a mechanism."""

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
        segment_ids_BS: jax.Array | None = None,
        mesh: jax.sharding.Mesh | None = None,
        temperature: jax.Array | None = None,
        **options,
    ) -> jax.Array:
        """Attention of a row's tokens among themselves.

        Args:
          positions: of the tokens, in the order they lie in; of context parallelism one order for
            all rows.
          mesh: of several devices. Where rows are split over `sequence`, what each token computes
            once (bases and latents) travels, and every device expands it: at d36 0.56 of the
            bytes of keys and values.
          segment_ids_BS: of the row's tokens in order, whatever order they lie in.
          temperature: [], what logits are divided by; None: 1.
          window, options: see `softmax_attention`.
        """
        q_BTNH, raw = self.mechanism.project(x_BTD, positions)
        if segment_ids_BS is not None and self.mechanism.config.needs_whole_rows:
            raise ValueError("segment_ids_BS: this attention takes a row as one text")
        if temperature is not None:
            q_BTNH = q_BTNH / temperature.astype(q_BTNH.dtype)
        query_positions = positions
        if mesh is not None and mesh.shape["sequence"] > 1:
            order_T = np.asarray(positions.index)[0]
            options |= dict(query_positions_T=order_T)
            if segment_ids_BS is not None:
                options |= dict(query_segment_ids_BT=segment_ids_BS[:, order_T])
            with jax.named_scope("latents"):
                fields = self.mechanism.config.entry()
                raw = {
                    name: _on_every_device(x, fields.get(name), order_T, mesh)
                    for name, x in raw.items()
                }
            positions = jax.tree.map(lambda a: a[:, np.argsort(order_T)], positions)
        k_BTKH, v_BTKH = self.mechanism.keys_values(raw, positions)
        o_BTNH = softmax_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            scale=self.mechanism.config.scale,
            causal=causal,
            window=window,
            segment_ids_BS=segment_ids_BS,
            mesh=mesh,
            **options,
        )
        return self.project_out(o_BTNH, x_BTD, query_positions)

    def decode(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        layer: dict[str, jax.Array],
        counts_B: jax.Array,
        *,
        rope_base: Base | None,
        window: int = 0,
        implementation: str | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attention of T new tokens over a cache that they join: ([B, T, D], the layer's cache).

        Args:
          positions: of the new tokens; those of a sequence follow its cached ones.
          layer: one layer of a `kvjax.cache.Cache`; the result takes its place.
          counts_B: how many of the T tokens are real; the rest is padding at the end.
          window, implementation: see `decode_attention`.
        """
        q_BTNH, raw = self.mechanism.project(x_BTD, positions)
        first_B = positions.index[:, 0]
        layer = append(layer, self.mechanism.encode(raw, positions), first_B, counts_B)
        inputs = self.mechanism.decode_inputs(q_BTNH, rope_base)
        how = dict(window=window, implementation=implementation)
        o_BTNH = decode_attention(inputs, layer, first_B, **how)
        return self.project_out(o_BTNH.astype(x_BTD.dtype), x_BTD, positions), layer

    def project_out(self, o_BTNH: jax.Array, x_BTD: jax.Array, positions: Positions) -> jax.Array:
        """[B, T, D] of what softmax attention made for queries at `positions`."""
        o_BTNH = self.mechanism.combine(o_BTNH, positions)
        if self.gate is not None:
            o_BTNH = o_BTNH * jax.nn.sigmoid(linear(x_BTD, self.gate[...]))
        return project_heads(o_BTNH, self.out, self.out_bias)


def project_heads(o_BTNH: jax.Array, out: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    """[B, T, D] of all heads' outputs, by a weight of axes "N H -> D"."""
    B, T, N, Hv = o_BTNH.shape
    y_BTD = linear(o_BTNH.reshape(B, T, N * Hv), out[...].reshape(N * Hv, -1))
    return y_BTD if bias is None else y_BTD + bias[...][None, None]


def _on_every_device(
    x_BT: jax.Array, field: Field | None, order_T: np.ndarray, mesh: jax.sharding.Mesh
) -> jax.Array:
    """[sequence * B, T, ..], tokens in order: a copy of a row for each device that has part of it.

    As copies, what is made of them has gradients of its own on every device, which are summed where
    the copies were made: latents travel both ways. One array for all devices would have the
    gradients of the expanded keys and values summed.
    """
    # Heads are split over `tensor`; one base, or what has no heads, is whole.
    heads = ()
    if field is not None and (field.heads or 1) > 1:
        heads = (*[None] * field.head_axis, "tensor")
    x_BT = constrain(x_BT, mesh, BATCH, "sequence", *heads)  # or its projection's input travels
    x_BT = sort_tokens(order_T, constrain(x_BT, mesh, BATCH, None, *heads))
    x_CBT = jnp.broadcast_to(x_BT[None], (mesh.shape["sequence"], *x_BT.shape))
    x_CBT = constrain(x_CBT, mesh, "sequence", BATCH, None, *heads)
    x_CBT = x_CBT.reshape(-1, *x_BT.shape[1:])
    return constrain(x_CBT, mesh, ("sequence", *BATCH), None, *heads)
