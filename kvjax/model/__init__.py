"""The Transformer, with any attention mechanism, and its loss. No files and no training here."""
