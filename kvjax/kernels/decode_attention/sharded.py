"""Decode attention over a cache whose tokens are split over several chips.

Every chip attends to its own tokens (`cache.stripes`), and the outputs are merged by their
log-sum-exps: two all-reduces per layer, and no cache is moved. Outputs [B, T, N, Hv] are merged
rather than weighted sums before their expansion, which have Hv + R (LRKV) or C (MLA) channels per
head, seldom fewer.
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
    **window: int,
) -> jax.Array:
    """See `api.decode_attention`; the mesh around this call has the axis `stripes.AXIS`.

    Args:
      cache: arrays split along S, a multiple of the chips; inputs and first_B are replicated.
      implementation: one of IMPLEMENTATIONS, which return log-sum-exps.
    """

    def of_chip(inputs, cache, first_B):
        held = stripes.local_stripes(next(iter(cache.values())).shape[-1])
        return merge(*IMPLEMENTATIONS[implementation](inputs, cache, first_B, held, **window))

    specs = (P(), {name: stripes.spec(array) for name, array in cache.items()}, P())
    # A loop's sums start equal on all chips and then differ, which check_vma refuses.
    split = jax.shard_map(of_chip, in_specs=specs, out_specs=P(), check_vma=False)
    return split(inputs, dict(cache), first_B)


def merge(o_BTNV: jax.Array, log_sum_exp_BTN: jax.Array) -> jax.Array:
    """Sums the chips' outputs by their shares of the softmax; -inf is a chip that sees no token."""
    largest_BTN = jax.lax.pmax(log_sum_exp_BTN, stripes.AXIS)
    share_BTN1 = jnp.exp(log_sum_exp_BTN - largest_BTN)[..., None]
    both = jnp.concatenate([o_BTNV * share_BTN1, share_BTN1], axis=-1)
    sums = jax.lax.psum(both, stripes.AXIS)
    return sums[..., :-1] / sums[..., -1:]
