"""What can be asked of attention, one layer at a time.

`heads` reads a model's weights as matrices of each head, `activations` what they make of a text,
and `cut_keys` runs a model with less of its keys; the others are pure functions on such arrays, in
float64.
"""
