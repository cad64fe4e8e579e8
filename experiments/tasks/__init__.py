"""The papers' small tasks: synthetic data, readers of local files, and a training loop."""
