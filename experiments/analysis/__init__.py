"""Code of the studies of trained attention: numbers of a run, seeds, Whisper's layers."""
