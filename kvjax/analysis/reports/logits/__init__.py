"""Spectra of attention logits, and of the weights behind them."""
