"""Attention of a few queries over a cache: arrays only, no weights of a model, no files."""
