"""Text generation: prefill and decode steps over a cache, sampling, streaming, scoring."""
