"""Text from a model: prefill and decode steps over a cache, sampling, prompts, streams."""
