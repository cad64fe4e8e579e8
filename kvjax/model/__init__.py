"""The Transformer that carries every mechanism, and its loss. Knows no files and no training."""
