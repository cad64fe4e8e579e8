"""One program for what a test calls once: without it each of its operations is compiled alone."""

import jax


def compiled(function, *arrays, **options):
    """Compiles a function and calls it on arrays, or trees of them; options are static."""
    return jax.jit(lambda *arrays: function(*arrays, **options))(*arrays)
