"""A small encoder-decoder: the source is encoded once, and every decoder layer attends to it.

Blocks are the Transformer's; decoder blocks have cross-attention between attention and MLP. There
is no norm after the embedding, and positions are RoPE or none. Layers are not scanned and weights
are not sharded, so models must be small.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.cross import CrossAttention, check as check_cross
from kvjax import cache as cache_lib
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.mechanism import MechanismConfig
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.layers.weight import InitRngs, weight
from kvjax.model.config import BlockConfig
from kvjax.model.transformer import Block, Compute, logits, make_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Encoder and decoder of `block.num_layers` layers each, with one vocabulary.

    Attributes:
      encoder, decoder: self-attention of the source and of the target.
      cross: attention of the target over the source.
    """

    block: BlockConfig
    encoder: MechanismConfig
    decoder: MechanismConfig
    cross: GroupedConfig
    vocab_size: int

    def __post_init__(self):
        check_cross(self.cross)
        fixed = dict(window=0, causal=True, tied_head=False, embedding_norm=False)
        fixed |= dict(norm_after=False, norm_outputs=False, dropout=0.0)
        fixed |= dict(norm_both=False, attention_softcap=0.0)
        fixed |= dict(embedding_scale=1.0, residual_scale=1.0, logit_divisor=1.0)
        fixed |= dict(rope_layers=(), rope_attention_factor=1.0)
        for key, value in fixed.items():
            setting = getattr(self.block, key)
            if setting != value:
                raise UserError(
                    f"config.model.{key} = {setting}: must be {value} in an encoder-decoder"
                )
        one_of("config.model.positions", self.block.positions, ("rope", "none"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """A decoder's caches: the target's, which grows, and the source's, written once.

    Attributes:
      source: see `kvjax.cache.Cache`; its lengths are the sources' lengths.
    """

    target: cache_lib.Cache
    source: cache_lib.Cache


class DecoderBlock(Block):
    """A Transformer block with cross-attention between attention and MLP."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(config.block, config.decoder, rngs=rngs)
        self.cross_norm = make_norm(config.block, rngs)
        self.cross = CrossAttention(config.cross, config.block.d_model, rngs=rngs)

    def __call__(self, x_BTD, positions, memory_BSD, lengths_B) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, causal=True)
        x_BTD = x_BTD + self.cross(self.cross_norm(x_BTD), memory_BSD, lengths_B)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def decode(self, x_BTD, positions, own: dict, source: dict, counts_B, lengths_B, rope_base):
        """Applies the block with caches.

        Args:
          own: cache layer of the target, appended to.
          source: cache layer of the source.

        Returns:
          Activations [B, T, D], and the target's cache layer.
        """
        h_BTD = self.attention_norm(x_BTD)
        y_BTD, own = self.attention.decode(h_BTD, positions, own, counts_B, rope_base=rope_base)
        x_BTD = x_BTD + y_BTD
        x_BTD = x_BTD + self.cross.decode(self.cross_norm(x_BTD), source, lengths_B)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), own


class EncoderDecoder(nnx.Module):
    """Maps sources [B, S] with lengths and targets [B, T] to logits [B, T, V]."""

    def __init__(self, config: EncoderDecoderConfig, key: jax.Array):
        self.config, c = config, config.block
        scales = dict(matrix_std=c.matrix_std, zero_outputs=c.zero_outputs)
        rngs = InitRngs(key, **scales)
        sizes = dict(V=config.vocab_size, D=c.d_model)
        self.embedding = weight("V D", rngs, init=c.embedding_std, **sizes)
        self.head = weight("D -> V", rngs, init="output", **sizes)
        layers = range(c.num_layers)
        self.encoder = nnx.List([Block(c, config.encoder, rngs=rngs) for _ in layers])
        self.decoder = nnx.List([DecoderBlock(config, rngs=rngs) for _ in layers])
        self.memory_norm, self.final_norm = (make_norm(c, rngs) for _ in range(2))

    def __call__(
        self, source_BS: jax.Array, lengths_B: jax.Array, target_BT: jax.Array
    ) -> jax.Array:
        """Returns logits [B, T, V] of the token after each target token.

        Args:
          lengths_B: int32, tokens of each source, at least 1; tokens beyond have no effect.
        """
        memory_BSD = self.encode(source_BS, lengths_B)
        x_BTD = self._embed(target_BT)
        positions = self._positions(np.arange(target_BT.shape[1])[None], self.config.decoder)
        for block in self.decoder:
            x_BTD = block(x_BTD, positions, memory_BSD, lengths_B)
        return self._logits(x_BTD)

    def encode(self, source_BS: jax.Array, lengths_B: jax.Array) -> jax.Array:
        """Returns the encoder's output [B, S, D]."""
        index_S = np.arange(source_BS.shape[1], dtype=np.int32)
        behind_BS = (index_S[None] >= lengths_B[:, None]).astype(jnp.int32)
        x_BSD = self._embed(source_BS)
        positions = self._positions(index_S[None], self.config.encoder)
        mask = dict(causal=False, segment_ids_BS=behind_BS)
        for block in self.encoder:
            x_BSD = block(x_BSD, positions, compute=Compute(dtype=x_BSD.dtype), **mask)
        return self.memory_norm(x_BSD)

    def remember(self, source_BS: jax.Array, lengths_B: jax.Array, capacity: int) -> Caches:
        """Returns caches with encoded sources, and space for targets of `capacity` tokens."""
        B, S = source_BS.shape
        memory_BSD = self.encode(source_BS, lengths_B)

        def allocate(mechanism: MechanismConfig, capacity: int) -> cache_lib.Cache:
            layers = [mechanism] * len(self.decoder)
            return cache_lib.allocate(layers, batch=B, capacity=capacity, dtype=memory_BSD.dtype)

        empty = allocate(self.config.cross, S)
        layers = tuple(
            block.cross.encode(memory_BSD, lengths_B, layer)
            for block, layer in zip(self.decoder, empty.layers, strict=True)
        )
        source = cache_lib.Cache(layers, jnp.asarray(lengths_B, jnp.int32))
        return Caches(allocate(self.config.decoder, capacity), source)

    def decode(
        self, target_BT: jax.Array, caches: Caches, counts_B: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """Returns logits [B, T, V] of new target tokens, and the caches with them appended.

        Args:
          counts_B: number of real tokens among the T; padding follows them. Tokens beyond the
            capacity given to `remember` are dropped.
        """
        c, target, source = self.config, caches.target, caches.source
        index_BT = target.lengths[:, None] + jnp.arange(target_BT.shape[1], dtype=jnp.int32)[None]
        x_BTD, positions = self._embed(target_BT), self._positions(index_BT, c.decoder)
        layers = []
        for block, own, read in zip(self.decoder, target.layers, source.layers, strict=True):
            x_BTD, own = block.decode(
                x_BTD, positions, own, read, counts_B, source.lengths, c.block.angles_base
            )
            layers.append(own)
        target = cache_lib.Cache(tuple(layers), target.lengths + counts_B)
        return self._logits(x_BTD), Caches(target, source)

    def _embed(self, tokens_BT: jax.Array) -> jax.Array:
        return self.embedding[...][tokens_BT]

    def _positions(self, index_BT, mechanism: MechanismConfig) -> rope.Positions:
        return rope.positions(index_BT, mechanism.rope_dim, self.config.block.angles_base)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        softcap = self.config.block.logit_softcap
        return logits(self.final_norm(x_BTD), self.head[...], softcap)


def greedy(model: EncoderDecoder, caches: Caches, begin: int, steps: int) -> jax.Array:
    """Decodes `steps` tokens [B, steps] greedily after `begin`.

    Raises:
      ValueError: the caches have too little capacity.
    """
    if steps > caches.target.capacity:
        raise ValueError(f"steps = {steps}: the caches have room for {caches.target.capacity}")
    B = caches.target.lengths.shape[0]
    ones_B = jnp.ones(B, jnp.int32)

    def step(carry, _):
        tokens_B, caches = carry
        z_BTV, caches = model.decode(tokens_B[:, None], caches, ones_B)
        tokens_B = jnp.argmax(z_BTV[:, 0], axis=-1).astype(jnp.int32)
        return (tokens_B, caches), tokens_B

    begins_B = jnp.full(B, begin, jnp.int32)
    return jnp.moveaxis(jax.lax.scan(step, (begins_B, caches), length=steps)[1], 0, 1)
