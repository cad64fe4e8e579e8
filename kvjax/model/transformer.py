"""The Transformer: embedding, scanned blocks, head.

The default recipe is nanochat's: RoPE, QK-norm, relu^2 MLP, RMSNorm without gains, norm after the
embedding, untied head with soft-capped logits. Consecutive layers with equal mechanisms form a
layer group: their weights are stacked and `jax.lax.scan` runs over them.

Initialisation (`layers/weight.py`):

    matrices                         N(0, std), std = min(1, sqrt(out/in)) / sqrt(in), or matrix_std
    embedding, learned positions     N(0, embedding_std), by default N(0, 1)
    attention.out, mlp.down, head    0 if zero_outputs, else like every matrix
    LRKV's B (expand_*)              like every matrix, 0, or PCA of random heads (residual_init)
    gains, biases                    1, 0
"""

from collections.abc import Callable
import dataclasses
import functools

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
from kvjax.model import layer_kinds
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.layer_kinds import Pattern
from kvjax.model.mlp import MLP

# Saves splash attention's residuals by name. cuDNN's have no name: its forward pass is recomputed.
_ATTENTION = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
# Activations of a layer that are saved for the backward pass; the others are recomputed. The
# layer's input is always saved.
REMAT_POLICIES = {
    "none": None,  # all of them: no rematerialisation
    "dots": jax.checkpoint_policies.save_from_both_policies(  # products with weights, attention
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ATTENTION
    ),
    "attention": _ATTENTION,  # outputs and log-sum-exps of the attention kernel
    "full": jax.checkpoint_policies.nothing_saveable,  # none of them
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """Options of the computation; they change speed, memory and rounding, not the function."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)  # of activations, and of weights in products
    remat: str = "none"  # a key of REMAT_POLICIES
    unroll: bool = False  # unroll the scan over layers (faster on CPU, slower to compile)
    cache_bits: int | None = None  # of a quantised KV cache, see `kvjax.cache.quantized`
    query_chunk: int = 0  # see `softmax_attention`
    loss_chunks: int = 8  # see `loss.num_slices`
    attention: str | None = None  # implementation of `softmax_attention`; None: by device
    # Several devices: activations are sharded over the batch (and `sequence`), weights are gathered
    # before use (FSDP). Without these constraints the compiler shards activations like the
    # embedding, along D.
    mesh: jax.sharding.Mesh | None = None

    def cast_and_gather(self, weight: jax.Array, axes: str) -> jax.Array:
        """Casts a weight to the compute dtype, then gathers it over `fsdp` (fewer bytes)."""
        return sharding.gather(weight.astype(self.dtype), axes, self.mesh)

    def shard_activations(self, x_BTD: jax.Array) -> jax.Array:
        """Constrains activations to be sharded over the batch and `sequence`."""
        return sharding.constrain(x_BTD, self.mesh, sharding.BATCH, "sequence")

    @property
    def cache_dtype(self) -> str:
        """Name of the dtype of a KV cache."""
        return str(self.dtype) if self.cache_bits is None else f"int{self.cache_bits}"

    @property
    def sequence_shards(self) -> int:
        """Number of devices that a row's tokens are sharded over."""
        return 1 if self.mesh is None else self.mesh.shape["sequence"]


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Or norm(x + f(x)) with `norm_after`, x + norm(f(x)) with `norm_outputs`, x + norm(f(norm(x)))
    with `norm_both`.
    """

    def __init__(self, config: BlockConfig, mechanism: MechanismConfig, *, rngs: nnx.Rngs):
        c = config
        self.norm_after, self.dropout = c.norm_after, c.dropout
        self.norm_outputs, self.residual_scale = c.norm_outputs, c.residual_scale
        mlp = dict(activation=c.activation, bias=c.bias)
        self.attention_norm = make_norm(c, rngs)
        self.mlp_norm = make_norm(c, rngs)
        self.attention_out_norm = make_norm(c, rngs) if c.norm_both else None
        self.mlp_out_norm = make_norm(c, rngs) if c.norm_both else None
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
        """Applies the block, [B, T, D] -> [B, T, D].

        Args:
          dropout: random key; None: no dropout.
          attend: masks and temperature; see `Attention`.
        """
        attend |= dict(
            query_chunk=compute.query_chunk,
            implementation=compute.attention,
            mesh=compute.mesh,
        )
        keys = (None, None) if dropout is None else jax.random.split(dropout)
        y_BTD = self.attention(self.attention_input(x_BTD), positions, **attend)
        x_BTD = self._add_attention(x_BTD, self._apply_dropout(y_BTD, keys[0]))
        return self._add_mlp(x_BTD, keys[1])

    def attention_input(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the input of the attention module, [B, T, D]."""
        return self._input(self.attention_norm, x_BTD)

    def _add_attention(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        return self._add(self.attention_norm, self.attention_out_norm, x_BTD, y_BTD)

    def _add_mlp(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        y_BTD = self.mlp(self._input(self.mlp_norm, x_BTD))
        y_BTD = self._apply_dropout(y_BTD, key)
        return self._add(self.mlp_norm, self.mlp_out_norm, x_BTD, y_BTD)

    def _input(self, norm: Norm, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.norm_after or self.norm_outputs else norm(x_BTD)

    def _add(
        self, norm: Norm, out_norm: Norm | None, x_BTD: jax.Array, y_BTD: jax.Array
    ) -> jax.Array:
        if self.norm_outputs:
            y_BTD = norm(y_BTD)
        if out_norm is not None:
            y_BTD = out_norm(y_BTD)
        x_BTD = x_BTD + _scaled(y_BTD, self.residual_scale)
        return norm(x_BTD) if self.norm_after else x_BTD

    def _apply_dropout(self, y_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        if key is None or not self.dropout:
            return y_BTD
        keep = jax.random.bernoulli(key, 1 - self.dropout, y_BTD.shape)
        return jnp.where(keep, y_BTD / (1 - self.dropout), 0).astype(y_BTD.dtype)

    def decode(
        self,
        x_BTD: jax.Array,
        positions: rope.Positions,
        layer: dict,
        counts_B: jax.Array,
        **options,
    ) -> tuple[jax.Array, dict]:
        """Applies the block with one layer of a cache; see `Attention.decode`."""
        h_BTD = self.attention_input(x_BTD)
        y_BTD, layer = self.attention.decode(h_BTD, positions, layer, counts_B, **options)
        return self._add_mlp(self._add_attention(x_BTD, y_BTD)), layer


def make_layer_groups(
    config: TransformerConfig, layer_rngs: Callable[[jax.Array], InitRngs]
) -> nnx.List:
    """Creates the blocks, one stack of weights per layer group.

    Args:
      layer_rngs: maps a layer's index to its random keys.
    """
    groups, first = nnx.List([]), 0
    for mechanism, length in config.layer_groups:

        def block(layer, mechanism=mechanism):
            return Block(config.block, mechanism, rngs=layer_rngs(layer))

        groups.append(jax.vmap(block)(jnp.arange(first, first + length)))
        first += length
    return groups


def apply_blocks(
    config: TransformerConfig,
    groups: nnx.List,
    x_BTD: jax.Array,
    positions_BT: jax.Array | np.ndarray,
    *,
    compute: Compute = Compute(),
    segment_ids_BS: jax.Array | None = None,
    dropout: jax.Array | None = None,
    temperature: jax.Array | None = None,
) -> jax.Array:
    """Applies all blocks, [B, T, D] -> [B, T, D]; arguments as in `Transformer`.

    Args:
      groups: from `make_layer_groups`.
      temperature: scalar array that attention logits are divided by; None: 1.
    """
    c = config.block
    attend = dict(causal=c.causal, segment_ids_BS=segment_ids_BS, temperature=temperature)
    has_dropout = dropout is not None and c.dropout > 0
    keys_L = jax.random.split(dropout, c.num_layers) if has_dropout else None
    first = 0
    for (mechanism, length), group in zip(config.layer_groups, groups, strict=True):
        graph, state = nnx.split(group)
        weights, axes = nnx.to_pure_dict(state), axes_of(state)

        kinds = c.layer_kinds[first : first + length]
        positions = {
            base: rope.positions(positions_BT, mechanism.rope_dim, base)
            for base in dict.fromkeys(kind.rope_base for kind in kinds)
        }

        def layer(x_BTD, weights_key, kind, graph=graph, axes=axes, positions=positions):
            weights, key = weights_key
            # Gathered inside the scan: one layer's full weights exist at a time.
            block = nnx.merge(graph, jax.tree.map(compute.cast_and_gather, weights, axes))
            x_BTD = compute.shard_activations(x_BTD)
            options = dict(compute=compute, dropout=key, **attend, **kind.attend)
            return block(x_BTD, positions[kind.rope_base], **options)

        keys = keys_L[first : first + length] if has_dropout else None
        x_BTD = _apply_patterns(layer, layer_kinds.patterns(kinds), x_BTD, (weights, keys), compute)
        first += length
    return x_BTD


def _apply_patterns(
    layer: Callable, patterns: tuple[Pattern, ...], x_BTD: jax.Array, stack, compute: Compute
) -> jax.Array:
    """Applies consecutive layers of equal shape, one scan per pattern.

    Args:
      layer: function of activations, a slice of the stack and the layer's kind.
      stack: tree of arrays with the layers as their first axis.
    """
    for pattern, layers in zip(patterns, _split_layers(stack, patterns), strict=True):
        unroll = pattern.repeats if compute.unroll else 1
        # In an unrolled scan, XLA's CSE would merge the recomputation with the forward pass and
        # keep all activations. In a loop it cannot.
        remat = dict(policy=REMAT_POLICIES[compute.remat], prevent_cse=unroll == pattern.repeats)

        def unit(x_BTD, layers, pattern=pattern, remat=remat):
            for index, kind in enumerate(pattern.unit):
                apply = functools.partial(layer, kind=kind)
                if compute.remat != "none":
                    apply = jax.checkpoint(apply, **remat)
                x_BTD = apply(x_BTD, jax.tree.map(lambda w, index=index: w[index], layers))
            return x_BTD, None

        x_BTD, _ = jax.lax.scan(unit, x_BTD, layers, unroll=unroll)
    return x_BTD


def _split_layers(stack, patterns: tuple[Pattern, ...]) -> list:
    """Splits a tree of stacked layers by pattern: [L, ...] to [repeats, layers of a unit, ...].

    The gradient of `jax.lax.split` is one concatenation; that of slices is a sum of padded arrays.
    """
    arrays, tree = jax.tree.flatten(stack)
    sizes = [pattern.num_layers for pattern in patterns]
    parts = [jax.lax.split(w, sizes) if len(sizes) > 1 else [w] for w in arrays]
    return [
        jax.tree.unflatten(tree, [w.reshape(p.repeats, len(p.unit), *w.shape[1:]) for w in of_part])
        for p, of_part in zip(patterns, zip(*parts, strict=True), strict=True)
    ]


class Transformer(nnx.Module):
    """Maps tokens [B, T] to final activations [B, T, D]; `logits` maps these to the vocabulary.

    Layer l draws its weights from `fold_in(key, l)`, so they do not depend on the layer groups.
    """

    def __init__(self, config: TransformerConfig, key: jax.Array):
        self.config = config
        c = config.block

        def layer_rngs(layer):
            layer_key = jax.random.fold_in(key, layer)
            return InitRngs(layer_key, matrix_std=c.matrix_std, zero_outputs=c.zero_outputs)

        rngs = layer_rngs(c.num_layers)
        sizes = dict(V=config.vocab_size, D=c.d_model, T=c.max_positions)
        self.embedding = weight("V D", rngs, init=c.embedding_std, **sizes)
        learned = c.positions == "learned"
        self.positions = weight("T D", rngs, init=c.embedding_std, **sizes) if learned else None
        self.head = None if c.tied_head else weight("D -> V", rngs, init="output", **sizes)
        self.embedding_norm = make_norm(c, rngs) if c.embedding_norm else None
        self.final_norm = None if c.norm_after else make_norm(c, rngs)
        self.segments = make_layer_groups(config, layer_rngs)  # the name in checkpoints

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        compute: Compute = Compute(),
        positions_BT: jax.Array | np.ndarray | None = None,
        segment_ids_BS: jax.Array | None = None,
        dropout: jax.Array | None = None,
    ) -> jax.Array:
        """Returns activations after the final norm, [B, T, D], in the compute dtype.

        Args:
          positions_BT: positions of the tokens in their row; None: 0, 1, 2, ...
          segment_ids_BS: int32 segment ids in the order of positions; a token attends only to
            tokens of its own segment (the document mask). None: to the whole row.
          dropout: random key; None: no dropout.
        """
        if positions_BT is None:
            positions_BT = np.arange(tokens_BT.shape[1])[None]
        x_BTD = self.embed(tokens_BT, positions_BT, compute)
        x_BTD = apply_blocks(
            self.config,
            self.segments,
            x_BTD,
            positions_BT,
            compute=compute,
            segment_ids_BS=segment_ids_BS,
            dropout=dropout,
        )
        return self.apply_final_norm(x_BTD)

    def apply_final_norm(self, x_BTD: jax.Array) -> jax.Array:
        """Applies the final norm (none with `norm_after`), and divides by `logit_divisor`."""
        x_BTD = x_BTD if self.final_norm is None else self.final_norm(x_BTD)
        return _scaled(x_BTD, 1 / self.config.block.logit_divisor)

    def embed(self, tokens_BT, positions_BT, compute: Compute) -> jax.Array:
        """Returns the input of the first block, [B, T, D]."""
        embedding_VD = compute.cast_and_gather(self.embedding[...], self.embedding.axes)
        x_BTD = compute.shard_activations(embedding_VD[tokens_BT])
        x_BTD = _scaled(x_BTD, self.config.block.embedding_scale)
        if self.positions is not None:
            positions_TD = compute.cast_and_gather(self.positions[...], self.positions.axes)
            x_BTD = x_BTD + positions_TD[positions_BT]
        if self.config.block.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoid.encoding(positions_BT, x_BTD.shape[-1]).astype(x_BTD.dtype)
        return x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)

    def head_weight(self, compute: Compute) -> jax.Array:
        """Returns the head [D, V], cast and gathered; the embedding's transpose if tied."""
        if self.head is None:
            return compute.cast_and_gather(self.embedding[...], self.embedding.axes).T
        return compute.cast_and_gather(self.head[...], self.head.axes)

    def logits(self, x_BTD: jax.Array, *, compute: Compute | None = None) -> jax.Array:
        """Returns the logits of final activations, [B, T, V], in float32 or wider."""
        compute = compute or Compute(dtype=x_BTD.dtype)
        softcap = self.config.block.logit_softcap
        if self.head is not None:
            return logits(x_BTD, self.head_weight(compute), softcap)
        # Not with `head_weight`: XLA on CPU would copy the transposed embedding for every token
        # (113 MB for SmolLM2-135M).
        w_VD = compute.cast_and_gather(self.embedding[...], self.embedding.axes)
        over_D = (((2,), (1,)), ((), ()))
        dtype = _logits_dtype(x_BTD, w_VD)
        z_BTV = jax.lax.dot_general(x_BTD, w_VD, over_D, preferred_element_type=dtype)
        return _softcap(z_BTV, softcap)


def compute_dtypes(params: dict, dtype: jnp.dtype) -> dict:
    """Returns the dtype in which each weight of a Transformer enters computations, as a tree.

    It is `dtype`, except for the norms outside the blocks, which keep their stored dtype.
    """
    norms = ("embedding_norm", "final_norm")

    def compute_dtype(path, w):
        return w.dtype if path[0].key in norms else jnp.dtype(dtype)

    return jax.tree_util.tree_map_with_path(compute_dtype, params)


def logits(x_BTD: jax.Array, head_DV: jax.Array, softcap: float) -> jax.Array:
    """Returns z = x W, or c·tanh(z/c) with a soft cap c > 0: [B, T, V], in float32 or wider.

    Logits are never rounded to bfloat16, in which the two largest of a vocabulary are often equal.
    """
    return _softcap(linear(x_BTD, head_DV, _logits_dtype(x_BTD, head_DV)), softcap)


def _logits_dtype(*operands: jax.Array) -> jnp.dtype:
    return jnp.promote_types(jnp.result_type(*operands), jnp.float32)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


def _softcap(z_BTV: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(z_BTV / cap) if cap else z_BTV


def make_norm(config: BlockConfig, rngs: nnx.Rngs) -> Norm:
    """Creates a norm over D of the configured kind."""
    return Norm(
        config.d_model,
        kind=config.norm,
        gain=config.norm_gain,
        bias=config.norm_bias,
        epsilon=config.norm_epsilon,
        offset=config.norm_offset,
        rngs=rngs,
    )
