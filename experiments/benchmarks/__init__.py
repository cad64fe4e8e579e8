"""Benchmarks: time, memory, and exactness of decoding from the cache."""
