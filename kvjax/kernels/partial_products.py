"""Products with few rows on a GPU, as partial sums that the kernel which reads them adds up.

One row per sequence has too few outputs to fill a GPU, so XLA splits the inner axis of a product,
and adds the partial sums and the residual stream in a second kernel; the norm is a third. Here
`partial_products` is the product without the addition, and `add_norm` does all the rest: two
kernels instead of three. Partial sums of projections are added by `prepare` and `prepare_latent`
(`decode_attention/gpu`).
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

# The inner axis is halved until a product of up to 16 rows has this many partial sums per row (a
# thousand programs of 16 each, seven for each multiprocessor of an H200), or as often as pieces are
# multiples of 64 channels, at most four times.
_PARTIAL_SUMS = 16_384
_ROWS = 16  # of a program
_THREADS = 128  # of a warpgroup
_PIECE = 8 * _THREADS  # channels at a time: their partial sums are loaded together


def partial_products(x_BK: jax.Array, w_KE: jax.Array) -> jax.Array:
    """Returns float32 [P, B, E] whose sum over P is the product of x and w."""
    B, K = x_BK.shape
    P = _parts(K, -(-B // _ROWS) * w_KE.shape[1])
    x_BPk, w_PkE = x_BK.reshape(B, P, -1), w_KE.reshape(P, K // P, -1)
    return jnp.einsum("BPk,PkE->PBE", x_BPk, w_PkE, preferred_element_type=jnp.float32)


def _parts(K: int, outputs: int) -> int:
    """Returns the number of pieces of the inner axis, of K channels."""
    allowed = [P for P in (1, 2, 4, 8, 16) if K % (64 * P) == 0] or [1]
    return next((P for P in allowed if P * outputs >= _PARTIAL_SUMS), allowed[-1])


@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))
def add_norm(
    x_BD: jax.Array, partials_PBD: jax.Array, *, epsilon: float, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """Returns x plus the sum of the partial products, and that over its root mean square.

    Grid (B). A program is one warpgroup. As in the model, the product is rounded to the dtype of x
    before it is added, and the sum before it is normed.

    Args:
      x_BD: residual stream, D a multiple of 128.
      partials_PBD: from `partial_products`.
      epsilon: added to the mean square.
    """
    (B, D), P, dtype = x_BD.shape, len(partials_PBD), x_BD.dtype
    strided = plgpu.Layout.WG_STRIDED
    pieces = [(start, min(_PIECE, D - start)) for start in range(0, D, _PIECE)]

    def load(ref, *at, size):
        vector = size // _THREADS & -(size // _THREADS)  # its largest power of two
        layout = strided((size,), vec_size=vector)
        return plgpu.load(ref.at[at], layout=layout, optimized=False).astype(jnp.float32)

    def kernel(x, partials, out, normed):
        b = lax.axis_index("sequence")
        if not interpret:
            plgpu.griddepcontrol_wait()  # stores of the product's programs -> the loads below
        sums, square = [], 0.0
        for start, size in pieces:
            at = pl.ds(start, size)
            parts = [load(partials, p, b, at, size=size) for p in range(P)]
            product_D = _rounded(functools.reduce(jnp.add, parts), dtype)
            sum_D = _rounded(load(x, b, at, size=size) + product_D, dtype)
            out.at[b, at][...] = sum_D.astype(dtype)
            square += jnp.sum(sum_D * sum_D)
            sums.append(sum_D)
        inverse = lax.rsqrt(square / D + epsilon)
        for (start, size), sum_D in zip(pieces, sums, strict=True):
            normed.at[b, pl.ds(start, size)][...] = (sum_D * inverse).astype(dtype)

    run = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((B, D), dtype),) * 2,
        grid=(B,),
        grid_names=("sequence",),
        interpret=interpret or None,
        kernel_name="add_norm",
    )
    return tuple(run(x_BD, partials_PBD))


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x.astype(dtype).astype(jnp.float32)
