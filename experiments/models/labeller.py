"""The Transformer as a classifier of every position, or of whole rows.

Rows of features [B, T, F] pass through a linear map, the blocks and a head. It has no cache; blocks
are bidirectional if `config.block.causal` is False.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.layers import sinusoid
from kvjax.layers.norm import Norm
from kvjax.layers.weight import InitRngs, affine, weight
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, apply_blocks, make_layer_groups, make_norm


class Labeller(nnx.Module):
    """Maps features [B, T, F] to logits [B, T, V] of every position, or [B, V] of the row.

    The head is a linear map after a norm, or after linear, LayerNorm and ReLU. For whole rows it
    reads the output of a learned class vector in front of the row.
    """

    def __init__(
        self,
        config: TransformerConfig,
        key: jax.Array,
        *,
        features: int,
        hidden: bool = True,
        whole: bool = False,
        input_dropout: float = 0.0,
    ):
        """Creates the weights.

        Args:
          config: its vocabulary is the set of labels.
          features: F, the input width.
          hidden: the head has a hidden layer.
          whole: one label per row, not per position.
          input_dropout: dropout rate of features, in training.
        """
        self.config, c = config, config.block
        self.input_dropout = input_dropout
        scales = dict(matrix_std=c.matrix_std, zero_outputs=c.zero_outputs)

        def layer_rngs(layer):
            return InitRngs(jax.random.fold_in(key, layer), **scales)

        rngs = layer_rngs(c.num_layers)
        sizes = dict(C=features, D=c.d_model, M=c.d_model, V=config.vocab_size, T=c.max_positions)
        self.input = weight("C -> D", rngs, **sizes)
        self.input_bias = weight("D", rngs, init="zeros", **sizes)
        self.row = weight("D", rngs, init=c.embedding_std, **sizes) if whole else None
        learned = c.positions == "learned"
        self.positions = weight("T D", rngs, init=c.embedding_std, **sizes) if learned else None
        self.final_norm = None if c.norm_after else make_norm(c, rngs)
        self.hidden = weight("D -> M", rngs, **sizes) if hidden else None
        if hidden:
            self.hidden_bias = weight("M", rngs, init="zeros", **sizes)
            affine_norm = dict(gain=True, bias=True, epsilon=1e-5)
            self.hidden_norm = Norm(c.d_model, kind="layer", **affine_norm, rngs=rngs)
        self.output = weight("D -> V", rngs, init="output", **sizes)
        self.output_bias = weight("V", rngs, init="zeros", **sizes)
        self.segments = make_layer_groups(config, layer_rngs)

    def __call__(
        self,
        x_BTF: jax.Array,
        *,
        compute: Compute = Compute(),
        dropout: jax.Array | None = None,
        temperature: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits.

        Args:
          dropout: a random key, in training.
          temperature: [], divides attention logits while it is annealed.
        """
        key = dropout
        if dropout is not None and self.input_dropout:
            key, mask_key = jax.random.split(dropout)
            kept = jax.random.bernoulli(mask_key, 1 - self.input_dropout, x_BTF.shape)
            x_BTF = jnp.where(kept, x_BTF / (1 - self.input_dropout), 0)
        x_BTD = affine(x_BTF, self.input, self.input_bias)
        if self.row is not None:
            row_B1D = jnp.broadcast_to(self.row[...], (x_BTD.shape[0], 1, x_BTD.shape[2]))
            x_BTD = jnp.concatenate([row_B1D, x_BTD], axis=1)
        index_1T = np.arange(x_BTD.shape[1])[None]
        if self.positions is not None:
            x_BTD = x_BTD + self.positions[...][index_1T]
        elif self.config.block.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoid.encoding(index_1T, x_BTD.shape[-1])
        options = dict(compute=compute, dropout=key, temperature=temperature)
        x_BTD = apply_blocks(self.config, self.segments, x_BTD, index_1T, **options)
        if self.row is not None:
            x_BTD = x_BTD[:, :1]
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        if self.hidden is not None:
            hidden_BTD = affine(x_BTD, self.hidden, self.hidden_bias)
            x_BTD = jax.nn.relu(self.hidden_norm(hidden_BTD))
        z_BTV = affine(x_BTD, self.output, self.output_bias)
        return z_BTV if self.row is None else z_BTV[:, 0]
