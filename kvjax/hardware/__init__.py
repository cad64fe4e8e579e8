"""Chips: datasheets, and topologies to compile for, which this machine need not have."""
