"""Benchmarks for trained models: `python -m kvjax.evaluate`."""
