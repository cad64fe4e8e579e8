"""Trained MHA models to convert to smaller caches, and the texts for that."""
