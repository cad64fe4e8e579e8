"""Which implementation of decode attention runs."""

from collections.abc import Mapping

import jax

from kvjax.kernels.decode_attention import reference
from kvjax.kernels.decode_attention import tpu
from kvjax.kernels.decode_attention import xla
from kvjax.kernels.decode_attention.operands import Operands

IMPLEMENTATIONS = {
    "xla": xla.decode_attention,
    "tpu": tpu.decode_attention,
    "reference": reference.decode_attention,
}


def decode_attention(
    operands: Operands,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of T new queries per sequence over its cache: [B, T, N, Hv], float32 or wider.

    Args:
      operands: queries, and the weights that the mechanism folds into reading its cache.
      cache: the arrays of one layer, [B, *shape, S]; the new tokens are in it already.
      first_B: [B] slot of each sequence's first new token; token t sees slots 0 .. first_B + t.
      implementation: "xla" (the default); "tpu", a kernel for LRKV that no TPU has run yet; or
        "reference", which expands the whole cache.

    Raises:
      NotImplementedError: the implementation does not take these operands; the message says why.
    """
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {name!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](operands, cache, first_B)
