"""Writes blocks of tokens into a cache of bytes on a TPU, in place."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@jax.jit  # traced once per shape, not once per layer
def write_blocks(array: jax.Array, blocks: jax.Array, start_B: jax.Array) -> jax.Array:
    """Copies blocks[b] to slots start_B[b] .. start_B[b] + W - 1 of sequence b.

    The kernel takes bytes in tiles T(32,128)(4,1), as a program's arguments have them. Between two
    operations of its own, such as writes to two sequences, XLA has T(8,128)(4,1), and would copy
    the whole array there and back.

    Args:
      array: [B, *shape, S], of one byte per element; the result takes its memory.
      blocks: [B, *shape, W].
      start_B: int32 multiples of 128, at most S - W.
    """
    B, W = blocks.shape[0], blocks.shape[-1]

    def kernel(start_ref, blocks_ref, _, array_ref, semaphore):
        copies = []
        for b in range(B):
            slots = pl.ds(pl.multiple_of(start_ref[b], 128), W)
            at = (b, *(slice(None),) * (array.ndim - 2), slots)
            copies.append(pltpu.make_async_copy(blocks_ref.at[b], array_ref.at[at], semaphore))
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        name="write_blocks",
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={2: 0},
    )(start_B, blocks, array)
