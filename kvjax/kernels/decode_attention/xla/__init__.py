"""Decode attention in plain JAX: takes everything, on any device."""
