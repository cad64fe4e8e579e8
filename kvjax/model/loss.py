"""Cross-entropy without a [B, T, V] array in memory.

With V = 65,536 the logits of a batch would be its largest activation by far. A device's tokens are
cut into slices (`num_slices`); only one slice's [t, V] logits exist at a time. On several devices
each processes its own tokens (shard_map) with the full head.
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
SLICE = 1 << 27  # logits of a slice at most: 256 MiB in bfloat16
# Soft caps up to this bound logits so well that exp(z - cap), at least exp(-80), is a normal number
# in float32 and bfloat16: no maximum is needed.
_BOUND = 40.0


def num_slices(tokens: int, vocab: int, at_least: int) -> int:
    """Returns the number of slices for a device's tokens: a divisor of `tokens`.

    It is the smallest one that is `at_least` and leaves a slice `SLICE` logits; without such a
    divisor below twice that, the largest one below it.
    """
    needed = min(tokens, max(at_least, -(-tokens * vocab // SLICE)))
    candidates = (*range(needed, 2 * needed), *range(needed - 1, 0, -1))
    return next(n for n in candidates if tokens % n == 0)


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
        slices = _slices((x_BTD, targets_BT), head_DV.shape[1], compute.loss_chunks)
        nats_nt = jax.lax.map(lambda xs: _nats(head_DV, *xs, softcap), slices)
        return nats_nt.reshape(targets_BT.shape)

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

    Logits of both models are computed in slices, and recomputed in the backward pass.

    Args:
      teacher: model with the same vocabulary, applied without dropout and gradient.
      dropout, row: see `Transformer`.
    """
    x_BTD = model(tokens_BT, compute=compute, dropout=dropout, **row)
    y_BTD = teacher(tokens_BT, compute=compute, **row)
    heads = model.head_weight(compute), teacher.head_weight(compute)
    softcaps = [m.config.block.logit_softcap for m in (model, teacher)]

    @jax.checkpoint
    def slice_loss(heads, x_tD, y_tD, targets_t):
        log_p, log_q = (
            jax.nn.log_softmax(logits(x, head, cap), axis=-1)
            for x, head, cap in zip((x_tD, y_tD), heads, softcaps, strict=True)
        )
        nats_t = -jnp.take_along_axis(log_p, targets_t[:, None], axis=-1)[:, 0]
        divergence_t = jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
        return (1 - share) * nats_t + share * divergence_t

    def losses(heads, x_BTD, y_BTD, targets_BT):
        slices = _slices((x_BTD, y_BTD, targets_BT), heads[0].shape[1], compute.loss_chunks)
        losses_nt = jax.lax.map(lambda xs: slice_loss(heads, *xs), slices)
        return losses_nt.reshape(targets_BT.shape)

    in_specs = ((P(), P()), _TOKENS, _TOKENS, _TOKENS)
    with jax.named_scope("loss"):
        losses = _per_device(losses, compute.mesh, in_specs, _TOKENS)
        return jnp.mean(losses(heads, x_BTD, jax.lax.stop_gradient(y_BTD), targets_BT))


def _nats(head_DV, x_tD, targets_t, softcap: float) -> jax.Array:
    """Returns the cross-entropy of each target, [t]."""
    z_tV = logits(x_tD, head_DV, softcap)
    target_t = jnp.take_along_axis(z_tV, targets_t[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(z_tV, axis=-1) - target_t


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sum_of_nats(softcap, chunks, mesh, head_DV, x_BTD, targets_BT, weights_BT=None) -> jax.Array:
    return _sum_and_gradients(softcap, chunks, mesh, head_DV, x_BTD, targets_BT, weights_BT)[0]


def _sum_and_gradients(softcap, chunks, mesh: Mesh | None, head_DV, x_BTD, targets_BT, weights_BT):
    """Returns the weighted sum of nats, and its gradients for head and activations.

    Each device accumulates a full head gradient [D, V] over its own tokens. The gradients are
    reduced over devices once, after the last slice: first a reduce-scatter over `fsdp`, so that the
    sum over the other axes sends less.
    """
    weights = [] if weights_BT is None else [weights_BT]

    def sums(head_DV, x_BTD, *targets):
        def step(carry, xs):
            total, dhead_DV = carry
            # The barrier makes a slice of x, which two products read, be cut out once.
            nats, dhead_slice, dx_tD = _slice(head_DV, softcap, *jax.lax.optimization_barrier(xs))
            return (total + nats, dhead_DV + dhead_slice), dx_tD

        wide = jnp.promote_types(head_DV.dtype, jnp.float32)
        zero = (jnp.zeros((), wide), jnp.zeros(head_DV.shape, wide))
        slices = _slices((x_BTD, *targets), head_DV.shape[1], chunks)
        (total, dhead_DV), dx_ntD = jax.lax.scan(step, zero, slices)
        if mesh is not None:
            total = jax.lax.psum(total, _MANUAL)
            dhead_DV = jax.lax.psum_scatter(dhead_DV, "fsdp", scatter_dimension=0, tiled=True)
            dhead_DV = jax.lax.psum(dhead_DV, ("data", "sequence"))
        return total, dhead_DV.astype(head_DV.dtype), dx_ntD.reshape(x_BTD.shape)

    in_specs = (P(), _TOKENS, _TOKENS, *[_TOKENS] * len(weights))
    sums = _per_device(sums, mesh, in_specs, (P(), P("fsdp"), _TOKENS))
    total, *gradients = sums(head_DV, x_BTD, targets_BT, *weights)
    return total, tuple(gradients)


def _slice(head_DV, softcap: float, x_tD, targets_t, weights_t=None):
    """Returns one slice's weighted sum of nats, and its gradients for head and activations.

    With logits z and sums S of exp(z - shift), the gradient of a logit is exp(z - shift) / S, minus
    1 for the target, times the soft cap's slope. Elementwise work on [t, V] is what a TPU waits
    for, so S divides x and dx instead: then exp, slope and rounding belong to the program that
    multiplies x by the head, and only its result, in the compute dtype, is in memory.

    Returns:
      The sum, the head's gradient in float32 or wider, and dx [t, D].
    """
    dtype, wide = x_tD.dtype, jnp.promote_types(head_DV.dtype, jnp.float32)

    def product(a, b, *axes):
        return jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=wide)

    z_tV = product(x_tD, head_DV, (1,), (0,))
    slope_tV = slope_t = 1.0
    if softcap:
        z_tV = softcap * jnp.tanh(z_tV / softcap)
    if 0 < softcap <= _BOUND:
        shift_t1 = jnp.full((1, 1), softcap, wide)
    else:
        shift_t1 = jnp.max(z_tV, axis=-1, keepdims=True)
    is_target_tV = jnp.arange(head_DV.shape[1])[None] == targets_t[:, None]
    exp_tV = jnp.exp(z_tV - shift_t1)
    others_t = jnp.sum(jnp.where(is_target_tV, 0, exp_tV), axis=-1)
    target_t = jnp.sum(jnp.where(is_target_tV, z_tV, 0), axis=-1)
    if softcap:
        slope_tV, slope_t = (1 - (z / softcap) ** 2 for z in (z_tV, target_t))
    exp_tV = (exp_tV * slope_tV).astype(dtype)
    # Without the barrier XLA keeps float32 logits on a TPU, and computes exp again in each product.
    # On a GPU, whose products take no such work, it would only part two passes.
    barrier = jax.lax.optimization_barrier
    exp_tV = jax.lax.platform_dependent(exp_tV, cuda=lambda x: x, default=barrier)
    target_t = target_t - shift_t1[:, 0]
    sum_t = others_t + jnp.exp(target_t)
    nats_t = jnp.log(sum_t) - target_t
    # The target's gradient is minus the others' probability, without cancellation.
    dz_tV = jnp.where(is_target_tV, (-others_t * slope_t).astype(dtype)[:, None], exp_tV)
    scale_t = 1 / sum_t if weights_t is None else weights_t / sum_t
    dx_tD = product(dz_tV, head_DV, (1,), (1,)) * scale_t[:, None]
    # x first: XLA on CPU copies the first operand of a product over tokens, here the narrower one.
    dhead_DV = product((x_tD * scale_t[:, None]).astype(dtype), dz_tV, (0,), (0,))
    total = jnp.sum(nats_t if weights_t is None else nats_t * weights_t)
    return total, dhead_DV, dx_tD.astype(dtype)


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


def _slices(arrays_BT: tuple[jax.Array, ...], vocab: int, at_least: int) -> tuple:
    """Reshapes arrays of a device's tokens from [B, T, ...] to [n, t, ...], see `num_slices`."""
    tokens = arrays_BT[0].shape[0] * arrays_BT[0].shape[1]
    n = num_slices(tokens, vocab, at_least)
    return tuple(x_BT.reshape(n, tokens // n, *x_BT.shape[2:]) for x_BT in arrays_BT)
