"""Attention with a small KV cache: Transformers trained, and decoded from that cache, in JAX."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # `python -m kvjax.main` is on its way: Ctrl-C while it imports
    from kvjax.foundation import environment, interrupted

    interrupted.quietly()
    environment.watch_imports()
