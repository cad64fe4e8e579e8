"""What studies of trained attention share: numbers of a run, several seeds, Whisper's layers."""
