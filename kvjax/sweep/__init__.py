"""Trains grids of runs: every combination of values of config keys, with several seeds."""
