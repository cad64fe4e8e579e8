"""Attention with a small KV cache: train, convert, serve and dissect Transformers in JAX."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # `python -m kvjax.main` is on its way: Ctrl-C while it imports
    from kvjax.foundation import interrupted

    interrupted.quietly()
