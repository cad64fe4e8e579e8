"""Compiles a function that a test calls once as one program, instead of operation by operation."""

import jax


def compiled(function, *arrays, **options):
    """Compiles a function and calls it on arrays, or trees of them; options are static."""
    return jax.jit(lambda *arrays: function(*arrays, **options))(*arrays)
