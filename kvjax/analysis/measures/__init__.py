"""Measurements of attention, one layer at a time.

`heads` reads a model's weights as matrices per head. `activations` runs a text through the model,
and `cut_keys` does so with low-rank keys. The other modules are pure functions of the arrays that
these three return, in float64.
"""
