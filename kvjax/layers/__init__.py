"""Leaves every model part shares: weights that know their axes, norms, rotary positions."""
