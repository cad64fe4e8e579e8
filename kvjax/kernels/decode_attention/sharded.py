"""Decode attention over a cache whose tokens are split over several chips.

Every chip attends over the tokens it holds (`stripes.py`); the results are merged by their
log-sum-exps. What is merged are outputs [B, T, N, Hv] rather than the sums before their expansion:
those have Hv + R (LRKV) or C (MLA) channels per head, seldom fewer. Two all-reduces per layer, and
no cache is moved.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvjax.cache import stripes
from kvjax.kernels.decode_attention import xla
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs


def _tpu(*args):
    from kvjax.kernels.decode_attention.tpu import attention  # where it runs, see `api`

    return attention.attend_with_lse(*args)


# (operands, a chip's cache, first_B, its Stripes) -> outputs [B, T, N, Hv], log-sum-exps [B, T, N].
IMPLEMENTATIONS = {"xla": xla.attend_with_lse, "tpu": _tpu}


def decode_attention(
    operands: DecodeInputs,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    implementation: str,
    **window: int,
) -> jax.Array:
    """See `api.decode_attention`; the mesh around this call has the axis `stripes.AXIS`.

    Args:
      cache: arrays split along S, a multiple of the chips; operands and first_B whole on each.

    Raises:
      NotImplementedError: the implementation cannot attend over a part of a cache.
    """
    if implementation not in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"implementation = {implementation!r} reads a whole cache: over several chips use one "
            f"of {', '.join(IMPLEMENTATIONS)}"
        )

    def of_chip(operands, cache, first_B):
        held = stripes.local_stripes(next(iter(cache.values())).shape[-1])
        return merge(*IMPLEMENTATIONS[implementation](operands, cache, first_B, held, **window))

    specs = (P(), {name: stripes.spec(array) for name, array in cache.items()}, P())
    # A loop's sums start equal on all chips and do not stay so, which check_vma cannot know.
    split = jax.shard_map(of_chip, in_specs=specs, out_specs=P(), check_vma=False)
    return split(operands, dict(cache), first_B)


def merge(o_BTNV: jax.Array, log_sum_exp_BTN: jax.Array) -> jax.Array:
    """All chips' outputs, each by its part of the softmax; -inf: of a chip with nothing to see."""
    largest_BTN = jax.lax.pmax(log_sum_exp_BTN, stripes.AXIS)
    share_BTN1 = jnp.exp(log_sum_exp_BTN - largest_BTN)[..., None]
    both = jnp.concatenate([o_BTNV * share_BTN1, share_BTN1], axis=-1)
    sums = jax.lax.psum(both, stripes.AXIS)
    return sums[..., :-1] / sums[..., -1:]
