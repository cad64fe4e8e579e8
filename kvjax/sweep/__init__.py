"""Trains grids of runs: values of config keys, times seeds."""
