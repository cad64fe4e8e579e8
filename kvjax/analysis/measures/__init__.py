"""What can be asked of attention, as pure functions on arrays in float64, one layer at a time.

`heads` gives a layer's weights as matrices of each head, `activations` what they make of a text;
the others answer a question each.
"""
