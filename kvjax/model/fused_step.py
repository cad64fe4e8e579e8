"""A block's decode step whose kernels add partial products, for one token per sequence on Hopper.

    x, h = add_norm(x, partial products of the previous block's MLP)
    x, h = add_norm(x, partial products of attention(h) and W_out)
    partial products of the MLP's hidden activations of h and W_down, for the next block

Blocks must be x + f(norm(x)) with RMSNorm, without gains and biases. Each product, addition and
norm is rounded as in `Block.decode`; partial sums are added in float32.
"""

import jax
import jax.numpy as jnp

from kvjax.layers import rope
from kvjax.layers.norm import Norm
from kvjax.model.transformer import Block


def takes(blocks: list[Block], x_BTD: jax.Array, implementation: str | None) -> bool:
    """Returns True if the kernels take these blocks and inputs.

    Args:
      blocks: of a decoder. Packed projections are whole on every GPU (`decoder.packs`).
      x_BTD: input of the first block, or its shape.
      implementation: of `Attention.decode`.
    """
    T, D = x_BTD.shape[1:]
    fits = T == 1 and D % 128 == 0 and x_BTD.dtype == jnp.bfloat16
    fits = fits and not jax.config.jax_enable_x64 and all(map(_is_plain, blocks))
    if not fits or implementation not in (None, "gpu"):
        return False
    from kvjax.kernels.decode_attention.gpu import attention  # when called, see `api`

    capability = attention.capability()
    in_interpreter = capability is None and implementation == "gpu"
    return capability == 9 or in_interpreter


def _is_plain(block: Block) -> bool:
    attention, norms = block.attention, (block.attention_norm, block.mlp_norm)
    others = (attention.out_bias, block.mlp.down_bias, block.attention_out_norm, block.mlp_out_norm)
    is_plain = not block.norm_after and not block.norm_outputs and block.residual_scale == 1
    is_plain = is_plain and all(other is None for other in others)
    return is_plain and bool(attention.mechanism.packed_columns) and all(map(_is_rms, norms))


def _is_rms(norm: Norm) -> bool:
    return norm.kind == "rms" and norm.gain is None and norm.bias is None


def decode(
    block: Block,
    x_BD: jax.Array,
    partials_PBD: jax.Array | None,
    positions: rope.Positions,
    layer: dict,
    counts_B: jax.Array,
    **options,
) -> tuple[jax.Array, jax.Array, dict]:
    """Applies a block to one token per sequence.

    Args:
      x_BD: residual stream before the previous block's MLP, or the embedding.
      partials_PBD: partial products of that MLP; None: this is the first block.
      positions, layer, counts_B, options: see `Attention.decode`.

    Returns:
      The residual stream before this block's MLP, the MLP's partial products, and the layer.
    """
    from kvjax.kernels.partial_products import add_norm, partial_products  # Mosaic is for GPUs

    B, D = x_BD.shape
    if partials_PBD is None:
        h_BD = block.attention_norm(x_BD)
    else:
        x_BD, h_BD = add_norm(x_BD, partials_PBD, epsilon=block.attention_norm.epsilon)
    o_BTNH, layer = block.attention.attend(h_BD[:, None], positions, layer, counts_B, **options)
    partials_PBD = partial_products(o_BTNH.reshape(B, -1), block.attention.out[...].reshape(-1, D))
    x_BD, h_BD = add_norm(x_BD, partials_PBD, epsilon=block.mlp_norm.epsilon)
    hidden_BM = block.mlp.hidden(h_BD[:, None])[:, 0]
    return x_BD, partial_products(hidden_BM, block.mlp.down[...]), layer


def add(x_BD: jax.Array, partials_PBD: jax.Array) -> jax.Array:
    """Returns the residual stream after the last block."""
    return x_BD + partials_PBD.sum(0).astype(x_BD.dtype)
