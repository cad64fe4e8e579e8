"""Turns text into batches: `prepare` writes packed rows, `loader` reads them from any position."""
