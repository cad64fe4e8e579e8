"""Layers that every model shares: weights with named axes, norms, rotary and other positions."""
