"""The Transformer with any attention mechanism, its decoder and its loss."""
