"""Measurements of attention, one layer at a time.

`heads` reads a model's weights as matrices per head, `activations` runs a text through them, and
`cut_keys` runs a model with low-rank keys; the other modules are pure functions on such arrays, in
float64.
"""
