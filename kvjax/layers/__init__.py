"""Layers that every model shares: weights with named axes, norms, position encodings."""
