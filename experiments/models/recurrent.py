"""A language model of linear attention, with a state of constant size.

Blocks are the Transformer's, with linear attention. Layers are not scanned and weights are not
sharded: the model is for comparison with small Transformers.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.linear import LinearAttention, LinearConfig, State
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.layers import sinusoid
from kvjax.layers.weight import InitRngs, weight
from kvjax.model.config import BlockConfig
from kvjax.model.mlp import MLP
from kvjax.model.transformer import logits, make_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Config of a whole model."""

    block: BlockConfig
    attention: LinearConfig
    vocab_size: int  # V

    def __post_init__(self):
        block = self.block
        fixed = dict(window=0, causal=True, norm_after=False, norm_outputs=False, dropout=0.0)
        fixed |= dict(norm_both=False, attention_softcap=0.0)
        fixed |= dict(embedding_scale=1.0, residual_scale=1.0, logit_divisor=1.0)
        for key, value in fixed.items():
            if getattr(block, key) != value:
                raise UserError(
                    f"config.model.{key} = {getattr(block, key)}: must be {value} in a model of "
                    "linear attention"
                )
        one_of("config.model.positions", block.positions, ("none", "sinusoidal"))


class RecurrentBlock(nnx.Module):
    """Pre-norm linear attention and MLP."""

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs):
        c = config.block
        self.attention_norm, self.mlp_norm = make_norm(c, rngs), make_norm(c, rngs)
        self.mlp = MLP(c.d_model, c.mlp_dim, activation=c.activation, bias=c.bias, rngs=rngs)
        self.attention = LinearAttention(config.attention, c.d_model, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, state: State, chunk: int) -> tuple[jax.Array, State]:
        y_BTD, state = self.attention(self.attention_norm(x_BTD), state, chunk=chunk)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), state


class RecurrentTransformer(nnx.Module):
    """Maps tokens [B, T] and a state to logits [B, T, V] and the next state."""

    def __init__(self, config: RecurrentConfig, key: jax.Array):
        self.config, c = config, config.block
        scales = dict(matrix_std=c.matrix_std, zero_outputs=c.zero_outputs)

        def layer_rngs(layer):
            return InitRngs(jax.random.fold_in(key, layer), **scales)

        rngs = layer_rngs(c.num_layers)
        sizes = dict(V=config.vocab_size, D=c.d_model)
        self.embedding = weight("V D", rngs, init=c.embedding_std, **sizes)
        self.head = None if c.tied_head else weight("D -> V", rngs, init="output", **sizes)
        self.embedding_norm = make_norm(c, rngs) if c.embedding_norm else None
        self.final_norm = make_norm(c, rngs)
        blocks = [RecurrentBlock(config, rngs=layer_rngs(layer)) for layer in range(c.num_layers)]
        self.blocks = nnx.List(blocks)

    def start(self, batch: int, dtype: jnp.dtype = jnp.float32) -> tuple[State, ...]:
        """Returns every layer's state before the first token."""
        return tuple(self.config.attention.start(batch, dtype) for _ in self.blocks)

    def __call__(
        self,
        tokens_BT: jax.Array,
        states: tuple[State, ...] | None = None,
        *,
        first: jax.Array | int = 0,
        chunk: int = 64,
    ) -> tuple[jax.Array, tuple[State, ...]]:
        """Returns logits [B, T, V] of the token after each token, and the states after the last.

        Args:
          states: states after the preceding text; None: there is none.
          first: position of the first token.
          chunk: tokens that attention processes at a time; 1 is the recurrence.
        """
        c = self.config.block
        x_BTD = self.embedding[...][tokens_BT]
        if c.positions == "sinusoidal":
            index_1T = first + np.arange(tokens_BT.shape[1])[None]
            x_BTD = x_BTD + sinusoid.encoding(index_1T, c.d_model).astype(x_BTD.dtype)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        if states is None:
            states = self.start(len(tokens_BT), x_BTD.dtype)
        states_after = []
        for block, state in zip(self.blocks, states, strict=True):
            x_BTD, state = block(x_BTD, state, chunk)
            states_after.append(state)
        head_DV = self.embedding[...].T if self.head is None else self.head[...]
        return logits(self.final_norm(x_BTD), head_DV, c.logit_softcap), tuple(states_after)
