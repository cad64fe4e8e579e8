"""Cross-entropy without a [B, T, V] array in memory.

With V = 65,536 the logits of a batch would be its largest activation by far. The sequence is cut
into `Compute.loss_chunks` slices of t tokens; only one slice's [B, t, V] logits exist at a time. On
several devices each processes its own tokens (shard_map) with the full head.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from kvjax.distributed.sharding import BATCH
from kvjax.model.transformer import Compute, Transformer, logits

_TOKENS = P(BATCH, "sequence")  # sharding of [B, T, ...]
# Mesh axes that shard_map handles; the compiler shards the vocabulary over `tensor`. A tuple, not a
# set: collectives depend on the order, and a set of strings has another order in every process.
_MANUAL = (*BATCH, "sequence")


def token_losses(
    model: Transformer,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    *,
    compute: Compute = Compute(),
    **row,
) -> jax.Array:
    """Returns the cross-entropy of every target in nats, [B, T], in float32 or wider.

    Args:
      row: positions_BT, segment_ids_BS, see `Transformer`.
    """
    x_BTD = model(tokens_BT, compute=compute, **row)
    softcap = model.config.block.logit_softcap
    return losses_from_hidden(model.head_weight(compute), x_BTD, targets_BT, softcap, compute)


def losses_from_hidden(
    head_DV: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array, softcap: float, compute: Compute
) -> jax.Array:
    """Computes `token_losses` from final activations and a head."""

    def nats(head_DV, x_BTD, targets_BT):
        slices = (_split(x_BTD, compute.loss_chunks), _split(targets_BT, compute.loss_chunks))
        return _join(jax.lax.map(lambda xs: _nats(head_DV, *xs, softcap), slices))

    in_specs = (P(), _TOKENS, _TOKENS)
    return _per_device(nats, compute.mesh, in_specs, _TOKENS)(head_DV, x_BTD, targets_BT)


def mean_loss(
    model: Transformer,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    *,
    weights_BT: jax.Array | None = None,
    scale: jax.Array | None = None,
    compute: Compute = Compute(),
    **row,
) -> jax.Array:
    """Returns the mean of `token_losses`, with a memory-efficient gradient.

    The forward pass computes each slice's gradients right after its logits; the backward pass only
    scales them by the cotangent. Logits are computed once and never stored.

    Args:
      weights_BT: weight of each target (the loss mask); None: 1.
      scale: factor on the sum; None: 1 / (B·T), the mean.
      row: positions_BT, segment_ids_BS, dropout, see `Transformer`.
    """
    x_BTD = model(tokens_BT, compute=compute, **row)
    head_DV, softcap = model.head_weight(compute), model.config.block.logit_softcap
    options = (softcap, compute.loss_chunks, compute.mesh)
    with jax.named_scope("loss"):
        total = _sum_of_nats(*options, head_DV, x_BTD, targets_BT, weights_BT)
        return total * (_reciprocal(targets_BT.size) if scale is None else scale)


def _reciprocal(count: int) -> jax.Array | float:
    """Returns 1 / count, bit-identical to the same factor passed in as an argument.

    Without the barrier XLA would fold the constant into neighbouring constants, which changes
    rounding unless it is a power of two. A run with all weights 1 must equal a run without weights.
    """
    if count & (count - 1) == 0:
        return 1.0 / count
    return jax.lax.optimization_barrier(jnp.asarray(1.0 / count, jnp.result_type(float)))


def distillation_loss(
    model: Transformer,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    *,
    teacher: Transformer,
    share: float,
    compute: Compute = Compute(),
    dropout: jax.Array | None = None,
    **row,
) -> jax.Array:
    """Returns the mean of (1 - share)·cross-entropy + share·KL(teacher || model).

    Logits of both models are computed in slices of T, and recomputed in the backward pass.

    Args:
      teacher: model with the same vocabulary, applied without dropout and gradient.
      dropout, row: see `Transformer`.
    """
    x_BTD = model(tokens_BT, compute=compute, dropout=dropout, **row)
    y_BTD = teacher(tokens_BT, compute=compute, **row)
    heads = model.head_weight(compute), teacher.head_weight(compute)
    softcaps = [m.config.block.logit_softcap for m in (model, teacher)]

    @jax.checkpoint
    def slice_loss(heads, x_BtD, y_BtD, targets_Bt):
        log_p, log_q = (
            jax.nn.log_softmax(logits(x, head, cap), axis=-1)
            for x, head, cap in zip((x_BtD, y_BtD), heads, softcaps, strict=True)
        )
        nats_Bt = -jnp.take_along_axis(log_p, targets_Bt[..., None], axis=-1)[..., 0]
        divergence_Bt = jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
        return (1 - share) * nats_Bt + share * divergence_Bt

    def losses(heads, *arrays_BT):
        slices = tuple(_split(x, compute.loss_chunks) for x in arrays_BT)
        return _join(jax.lax.map(lambda xs: slice_loss(heads, *xs), slices))

    in_specs = ((P(), P()), _TOKENS, _TOKENS, _TOKENS)
    with jax.named_scope("loss"):
        losses = _per_device(losses, compute.mesh, in_specs, _TOKENS)
        return jnp.mean(losses(heads, x_BTD, jax.lax.stop_gradient(y_BTD), targets_BT))


def _nats(head_DV, x_BtD, targets_Bt, softcap: float) -> jax.Array:
    """Returns the cross-entropy of each target, [B, t]."""
    z_BtV = logits(x_BtD, head_DV, softcap)
    target_Bt = jnp.take_along_axis(z_BtV, targets_Bt[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(z_BtV, axis=-1) - target_Bt


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sum_of_nats(softcap, chunks, mesh, head_DV, x_BTD, targets_BT, weights_BT=None) -> jax.Array:
    return _sum_and_gradients(softcap, chunks, mesh, head_DV, x_BTD, targets_BT, weights_BT)[0]


def _sum_and_gradients(softcap, chunks, mesh: Mesh | None, head_DV, x_BTD, targets_BT, weights_BT):
    """Returns the weighted sum of nats, and its gradients for head and activations.

    Each device accumulates a full head gradient [D, V] over its own tokens. The gradients are
    reduced over devices once, after the last slice: first a reduce-scatter over `fsdp`, so that the
    sum over the other axes sends less.
    """

    def loss(head_DV, x_BtD, targets_Bt, weights_Bt=None):
        nats_Bt = _nats(head_DV, x_BtD, targets_Bt, softcap)
        return jnp.sum(nats_Bt if weights_Bt is None else nats_Bt * weights_Bt)

    weights = [] if weights_BT is None else [weights_BT]

    def sums(head_DV, x_BTD, *targets):
        def step(carry, xs):
            total, dhead_DV = carry
            nats, (dhead_slice, dx) = jax.value_and_grad(loss, argnums=(0, 1))(head_DV, *xs)
            return (total + nats, dhead_DV + dhead_slice.astype(dhead_DV.dtype)), dx

        wide = jnp.promote_types(head_DV.dtype, jnp.float32)
        zero = (jnp.zeros((), wide), jnp.zeros(head_DV.shape, wide))
        slices = (_split(x_BTD, chunks), *(_split(x, chunks) for x in targets))
        (total, dhead_DV), dx = jax.lax.scan(step, zero, slices)
        if mesh is not None:
            total = jax.lax.psum(total, _MANUAL)
            dhead_DV = jax.lax.psum_scatter(dhead_DV, "fsdp", scatter_dimension=0, tiled=True)
            dhead_DV = jax.lax.psum(dhead_DV, ("data", "sequence"))
        return total, dhead_DV.astype(head_DV.dtype), _join(dx)

    in_specs = (P(), _TOKENS, _TOKENS, *[_TOKENS] * len(weights))
    sums = _per_device(sums, mesh, in_specs, (P(), P("fsdp"), _TOKENS))
    total, *gradients = sums(head_DV, x_BTD, targets_BT, *weights)
    return total, tuple(gradients)


def _per_device(function, mesh: Mesh | None, in_specs, out_specs):
    """Applies a function on each device to its own tokens; P() replicates an argument."""
    if mesh is None:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*_MANUAL},
        check_vma=False,
    )


def _scale_gradients(softcap, chunks, mesh, gradients, cotangent):
    dhead_DV, dx_BTD = jax.tree.map(lambda g: g * cotangent.astype(g.dtype), gradients)
    return dhead_DV, dx_BTD, None, None


_sum_of_nats.defvjp(_sum_and_gradients, _scale_gradients)


def _split(x_BT: jax.Array, chunks: int) -> jax.Array:
    """Reshapes [B, T, ...] to [n, B, T/n, ...], n the largest divisor of T up to `chunks`."""
    B, T = x_BT.shape[:2]
    n = next(n for n in range(min(chunks, T), 0, -1) if T % n == 0)
    return jnp.moveaxis(x_BT.reshape(B, n, T // n, *x_BT.shape[2:]), 1, 0)


def _join(x_nBt: jax.Array) -> jax.Array:
    """Inverts `_split`."""
    n, B, t = x_nBt.shape[:3]
    return jnp.moveaxis(x_nBt, 0, 1).reshape(B, n * t, *x_nBt.shape[3:])
