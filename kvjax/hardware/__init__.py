"""Chips: datasheets, and topologies to compile for that need not be there."""
