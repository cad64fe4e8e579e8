"""The Transformer: embedding, segments of scanned blocks, head.

Where what is initialised:

    matrices                          N(0, min(1, sqrt(out/in))/sqrt(in)), or `matrix_std`
    embedding (and learned positions) N(0, 1), or `embedding_std`
    attention.out, mlp.down, head     0, or like every matrix (`zero_outputs`)
    LRKV's B (expand_*)               like every matrix, or 0, or near MHA (`residual_init`)
    gains, biases                     1, 0
"""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import Attention
from kvjax.attention.mechanism import MechanismConfig
from kvjax.distributed import sharding
from kvjax.kernels.softmax_attention.api import RESIDUALS
from kvjax.layers import rope, sinusoid
from kvjax.layers.norm import Norm
from kvjax.layers.weight import InitRngs, axes_of, linear, weight
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.mlp import MLP

# Keeps what splash names. What cuDNN's backward pass needs has no name: its kernel runs again.
_KERNEL = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
# What is kept for the backward pass, which computes the rest again: a layer's input, and
REMAT_POLICIES = {
    "none": None,  # everything
    "dots": jax.checkpoint_policies.save_from_both_policies(  # products with weights, and
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KERNEL
    ),
    "attention": _KERNEL,  # what the attention kernel made
    "full": jax.checkpoint_policies.nothing_saveable,  # nothing
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """How a model is computed; nothing here changes what it computes, beyond rounding."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)  # of activations and of weights when used
    remat: str = "none"  # what the backward pass recomputes: a key of REMAT_POLICIES
    unroll: bool = False  # unroll the scan over layers (faster on CPU, slower to compile)
    query_chunk: int = 0  # see `softmax_attention`
    loss_chunks: int = 8  # see `loss.token_losses`
    attention: str | None = None  # implementation, see `softmax_attention`; None: by the device
    # On several devices: activations are split over the batch (and `sequence`), and a weight is
    # gathered for its use. Left to itself, the compiler splits activations as the embedding is.
    mesh: jax.sharding.Mesh | None = None

    def cast_and_gather(self, weight: jax.Array, axes: str) -> jax.Array:
        """A weight as it enters a product: in the compute dtype, whole along `fsdp`."""
        return sharding.gather(weight.astype(self.dtype), axes, self.mesh)

    def shard_activations(self, x_BTD: jax.Array) -> jax.Array:
        """Activations, split over the batch and `sequence`."""
        return sharding.constrain(x_BTD, self.mesh, sharding.BATCH, "sequence")

    @property
    def sequence_shards(self) -> int:
        """How many ways the tokens of a row are split."""
        return 1 if self.mesh is None else self.mesh.shape["sequence"]


class Block(nnx.Module):
    """Attention and MLP, each with a norm before it, or behind its sum (`norm_after`)."""

    def __init__(self, config: BlockConfig, mechanism: MechanismConfig, *, rngs: nnx.Rngs):
        c = config
        self.norm_after, self.dropout = c.norm_after, c.dropout
        mlp = dict(activation=c.activation, bias=c.bias)
        self.attention_norm = make_norm(c, rngs)
        self.mlp_norm = make_norm(c, rngs)
        self.mlp = MLP(c.d_model, c.mlp_dim, **mlp, rngs=rngs)
        self.attention = Attention(mechanism, c.d_model, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: rope.Positions,
        *,
        compute: Compute,
        dropout: jax.Array | None = None,
        **attend,
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D].

        Args:
          dropout: a key, in training; without it nothing is dropped.
          attend: which tokens see which, and a temperature; see `Attention`.
        """
        attend |= dict(
            query_chunk=compute.query_chunk,
            implementation=compute.attention,
            mesh=compute.mesh,
        )
        keys = (None, None) if dropout is None else jax.random.split(dropout)
        y_BTD = self.attention(self.attention_input(x_BTD), positions, **attend)
        x_BTD = self._added(self.attention_norm, x_BTD, self._dropped(y_BTD, keys[0]))
        return self._with_mlp(x_BTD, keys[1])

    def attention_input(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D]: what queries, keys and values are made of."""
        return x_BTD if self.norm_after else self.attention_norm(x_BTD)

    def _with_mlp(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        y_BTD = self.mlp(x_BTD if self.norm_after else self.mlp_norm(x_BTD))
        return self._added(self.mlp_norm, x_BTD, self._dropped(y_BTD, key))

    def _added(self, norm: Norm, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + y_BTD
        return norm(x_BTD) if self.norm_after else x_BTD

    def _dropped(self, y_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        if key is None or not self.dropout:
            return y_BTD
        kept = jax.random.bernoulli(key, 1 - self.dropout, y_BTD.shape)
        return jnp.where(kept, y_BTD / (1 - self.dropout), 0).astype(y_BTD.dtype)

    def decode(
        self, x_BTD: jax.Array, positions: rope.Positions, layer: dict, counts_B: jax.Array, **keys
    ) -> tuple[jax.Array, dict]:
        """The block over one layer of a cache; see `Attention.decode`."""
        h_BTD = self.attention_input(x_BTD)
        y_BTD, layer = self.attention.decode(h_BTD, positions, layer, counts_B, **keys)
        return self._with_mlp(self._added(self.attention_norm, x_BTD, y_BTD)), layer


def make_layer_groups(
    config: TransformerConfig, draws: Callable[[jax.Array], InitRngs]
) -> nnx.List:
    """Stacks of blocks, of layers of one mechanism each.

    Args:
      draws: of a layer's index, what its weights are drawn from.
    """
    segments, first = nnx.List([]), 0
    for mechanism, length in config.layer_groups:
        block = lambda layer, mechanism=mechanism: Block(config.block, mechanism, rngs=draws(layer))
        segments.append(jax.vmap(block)(jnp.arange(first, first + length)))
        first += length
    return segments


def apply_blocks(
    config: TransformerConfig,
    segments: nnx.List,
    x_BTD: jax.Array,
    positions_BT: jax.Array | np.ndarray,
    *,
    compute: Compute = Compute(),
    segment_ids_BS: jax.Array | None = None,
    dropout: jax.Array | None = None,
    temperature: jax.Array | None = None,
) -> jax.Array:
    """What the last block makes of what enters the first, [B, T, D]; see `Transformer`.

    Args:
      segments: of `make_layer_groups`.
      temperature: what logits of attention are divided by.
    """
    c = config.block
    attend = dict(causal=c.causal, window=c.window, temperature=temperature)
    attend |= dict(segment_ids_BS=segment_ids_BS)
    drawn = dropout is not None and c.dropout > 0
    keys_L = jax.random.split(dropout, c.num_layers) if drawn else None
    first = 0
    for (mechanism, length), segment in zip(config.layer_groups, segments, strict=True):
        positions = rope.positions(positions_BT, mechanism.rope_dim, c.angles_base)
        graph, state = nnx.split(segment)
        weights, axes = nnx.to_pure_dict(state), axes_of(state)

        def layer(x_BTD, weights_key, graph=graph, axes=axes, positions=positions):
            weights, key = weights_key
            block = nnx.merge(graph, jax.tree.map(compute.cast_and_gather, weights, axes))
            how = dict(compute=compute, dropout=key)
            return block(compute.shard_activations(x_BTD), positions, **attend, **how), None

        if compute.remat != "none":
            policy = REMAT_POLICIES[compute.remat]
            # Only a real loop keeps XLA from merging the recomputation with the first one.
            unrolled = compute.unroll or length == 1
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=unrolled)
        unroll = length if compute.unroll else 1
        keys = keys_L[first : first + length] if drawn else None
        first += length
        x_BTD, _ = jax.lax.scan(layer, x_BTD, (weights, keys), unroll=unroll)
    return x_BTD


class Transformer(nnx.Module):
    """Tokens [B, T] to final activations [B, T, D]; `logits` maps those to the vocabulary.

    Layer l draws its weights from `fold_in(key, l)`, so they do not depend on how layers are
    grouped into segments.
    """

    def __init__(self, config: TransformerConfig, key: jax.Array):
        self.config = config
        c = config.block
        start = dict(matrix_std=c.matrix_std, zero_outputs=c.zero_outputs)
        draws = lambda layer: InitRngs(jax.random.fold_in(key, layer), **start)
        rngs = draws(c.num_layers)
        sizes = dict(V=config.vocab_size, D=c.d_model, T=c.max_positions)
        self.embedding = weight("V D", rngs, init=c.embedding_std, **sizes)
        learned = c.positions == "learned"
        self.positions = weight("T D", rngs, init=c.embedding_std, **sizes) if learned else None
        self.head = None if c.tied_head else weight("D -> V", rngs, init="output", **sizes)
        self.embedding_norm = make_norm(c, rngs) if c.embedding_norm else None
        self.final_norm = None if c.norm_after else make_norm(c, rngs)
        self.segments = make_layer_groups(config, draws)

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        compute: Compute = Compute(),
        positions_BT: jax.Array | np.ndarray | None = None,
        segment_ids_BS: jax.Array | None = None,
        dropout: jax.Array | None = None,
    ) -> jax.Array:
        """Activations after the final norm, [B, T, D], in the compute dtype.

        Args:
          positions_BT: where the tokens stand in their row, if not in order.
          segment_ids_BS: int32, of the row's tokens in order: a token sees those of its own alone.
          dropout: a key, in training; without it nothing is dropped.
        """
        if positions_BT is None:
            positions_BT = np.arange(tokens_BT.shape[1])[None]
        x_BTD = self.embed(tokens_BT, positions_BT, compute)
        how = dict(compute=compute, segment_ids_BS=segment_ids_BS, dropout=dropout)
        return self.apply_final_norm(
            apply_blocks(self.config, self.segments, x_BTD, positions_BT, **how)
        )

    def apply_final_norm(self, x_BTD: jax.Array) -> jax.Array:
        """What the last block made, as the head takes it: normed, if a block does not end so."""
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)

    def embed(self, tokens_BT, positions_BT, compute: Compute) -> jax.Array:
        """[B, T, D]: what enters the first block."""
        x_BTD = compute.shard_activations(
            compute.cast_and_gather(self.embedding[...], self.embedding.axes)[tokens_BT]
        )
        if self.positions is not None:
            x_BTD = (
                x_BTD
                + compute.cast_and_gather(self.positions[...], self.positions.axes)[positions_BT]
            )
        if self.config.block.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoid.encoding(positions_BT, x_BTD.shape[-1]).astype(x_BTD.dtype)
        return x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)

    def head_weight(self, compute: Compute) -> jax.Array:
        """[D, V], as it enters a product: the head, or the embedding if they are tied."""
        if self.head is None:
            return compute.cast_and_gather(self.embedding[...], self.embedding.axes).T
        return compute.cast_and_gather(self.head[...], self.head.axes)

    def logits(self, x_BTD: jax.Array, *, compute: Compute | None = None) -> jax.Array:
        """[B, T, V] logits of final activations, in float32 or wider."""
        compute = compute or Compute(dtype=x_BTD.dtype)
        softcap = self.config.block.logit_softcap
        if self.head is not None:
            return logits(x_BTD, self.head_weight(compute), softcap)
        # As it lies: XLA on CPU would transpose the embedding, 113 MB of SmolLM2, for each token.
        w_VD = compute.cast_and_gather(self.embedding[...], self.embedding.axes)
        over_D = (((2,), (1,)), ((), ()))
        dtype = _logits_dtype(x_BTD, w_VD)
        return _capped(
            jax.lax.dot_general(x_BTD, w_VD, over_D, preferred_element_type=dtype), softcap
        )


def compute_dtypes(params: dict, dtype: jnp.dtype) -> dict:
    """Per weight of a Transformer's pure dict, its dtype in a model that computes in `dtype`.

    That dtype, but for the norms outside the blocks: those apply their weights as they are stored.
    """
    norms = ("embedding_norm", "final_norm")
    one = lambda path, w: w.dtype if path[0].key in norms else jnp.dtype(dtype)
    return jax.tree_util.tree_map_with_path(one, params)


def logits(x_BTD: jax.Array, head_DV: jax.Array, softcap: float) -> jax.Array:
    """[B, T, V] in float32 or wider: z = x W, and c·tanh(z/c) where there is a soft cap c.

    Never rounded to bfloat16 in between, where the largest two of many logits are often equal.
    """
    return _capped(linear(x_BTD, head_DV, _logits_dtype(x_BTD, head_DV)), softcap)


def _logits_dtype(*operands: jax.Array) -> jnp.dtype:
    return jnp.promote_types(jnp.result_type(*operands), jnp.float32)


def _capped(z_BTV: jax.Array, softcap: float) -> jax.Array:
    return softcap * jnp.tanh(z_BTV / softcap) if softcap else z_BTV


def make_norm(config: BlockConfig, rngs: nnx.Rngs) -> Norm:
    """A norm of [.., D] as the blocks have them."""
    c = config
    affine = dict(gain=c.norm_gain, bias=c.norm_bias)
    return Norm(c.d_model, kind=c.norm, **affine, epsilon=c.norm_epsilon, rngs=rngs)
