"""Spectra of the logits of attention, and of the weights that make them."""
