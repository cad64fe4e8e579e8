"""Decode attention as Pallas kernels for TPUs."""
