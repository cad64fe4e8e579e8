"""Report on the spectra of attention logits, and of the weights that make them."""
