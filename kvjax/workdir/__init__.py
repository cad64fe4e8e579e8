"""A run's folder: identity, checkpoints, records, and the trained model in it."""
