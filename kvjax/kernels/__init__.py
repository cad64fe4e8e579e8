"""Attention over rows (training) and over a cache (decoding): arrays only, no weights, no files."""
