"""The folder of a run: checkpoints, records, what it belongs to, and the trained model in it."""
