"""Text to batches: `prepare` writes packed rows once, `loader` reads them from any position."""
