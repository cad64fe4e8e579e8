"""Diversity of the heads of a layer."""
