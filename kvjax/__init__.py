"""Attention with a small KV cache: train, convert, serve and dissect Transformers in JAX."""

__version__ = "0.1.0"
