"""Cross-entropy without a [B, T, V] array in memory."""

import jax
import jax.numpy as jnp

from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer


def token_losses(
    model: Transformer, tokens_BT: jax.Array, targets_BT: jax.Array, *, compute: Compute = Compute()
) -> jax.Array:
    """Nats of every target, [B, T], in float32 or wider.

    Logits are made, used and dropped for `compute.loss_chunks` slices of T in turn, and made again
    in the backward pass: memory falls by that factor for V·D extra multiply-adds per token.
    """
    x_BTD = model(tokens_BT, compute=compute)

    def nats(x_BtD, targets_Bt):
        z_BtV = model.logits(x_BtD)
        target_Bt = jnp.take_along_axis(z_BtV, targets_Bt[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(z_BtV, axis=-1) - target_Bt

    T = targets_BT.shape[1]
    chunks = next(n for n in range(min(compute.loss_chunks, T), 0, -1) if T % n == 0)
    if chunks == 1:
        return nats(x_BTD, targets_BT)
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], chunks, T // chunks, *x.shape[2:]), 1, 0)
    slices = (split(x_BTD), split(targets_BT))
    _, losses = jax.lax.scan(lambda _, xs: (None, jax.checkpoint(nats)(*xs)), None, slices)
    return jnp.moveaxis(losses, 0, 1).reshape(targets_BT.shape)
