"""Decode attention over a cache whose tokens are split over several chips.

Every chip attends to its own tokens (`cache.stripes`), and the outputs are merged by their
log-sum-exps: two all-reduces per layer, and no cache is moved. Each chip expands its weighted sums
to outputs before the merge, because outputs have only Hv channels per head, and weighted sums
usually more: Hv + R for LRKV, C for MLA.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvjax.cache import stripes
from kvjax.kernels.decode_attention import xla
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs


def _tpu(*args):
    from kvjax.kernels.decode_attention.tpu import attention  # imported when called, see `api`

    return attention.attend_with_lse(*args)


# (inputs, a chip's cache, first_B, its Stripes) -> outputs [B, T, N, Hv], log-sum-exps [B, T, N].
IMPLEMENTATIONS = {"xla": xla.attend_with_lse, "tpu": _tpu}


def decode_attention(
    inputs: DecodeInputs,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    implementation: str,
    **options,
) -> jax.Array:
    """See `api.decode_attention`; the mesh around this call has the axis `stripes.AXIS`.

    Args:
      cache: arrays sharded along S, a multiple of the number of chips; inputs and first_B are
        replicated.
      implementation: one of IMPLEMENTATIONS, which return log-sum-exps.
      options: window and softcap, if there are any.
    """

    def attend_on_chip(inputs, cache, first_B):
        local = stripes.local_stripes(next(iter(cache.values())).shape[-1])
        return merge(*IMPLEMENTATIONS[implementation](inputs, cache, first_B, local, **options))

    specs = (P(), {name: stripes.spec(array) for name, array in cache.items()}, P())
    # check_vma rejects a loop whose carry is equal on all chips only at the start.
    attend = jax.shard_map(attend_on_chip, in_specs=specs, out_specs=P(), check_vma=False)
    return attend(inputs, dict(cache), first_B)


def merge(o_BTNV: jax.Array, log_sum_exp_BTN: jax.Array) -> jax.Array:
    """Averages the chips' outputs, weighted by exp(log-sum-exp), 0 for a chip without tokens."""
    largest_BTN = jax.lax.pmax(log_sum_exp_BTN, stripes.AXIS)
    weight_BTN1 = jnp.exp(log_sum_exp_BTN - largest_BTN)[..., None]
    o_and_weight = jnp.concatenate([o_BTNV * weight_BTN1, weight_BTN1], axis=-1)
    sums = jax.lax.psum(o_and_weight, stripes.AXIS)
    return sums[..., :-1] / sums[..., -1:]
