"""Accelerators: datasheets, and topologies to compile for without having the hardware."""
