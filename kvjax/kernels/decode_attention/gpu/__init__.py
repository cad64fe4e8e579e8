"""Decode attention as a Mosaic GPU kernel for Hopper."""
