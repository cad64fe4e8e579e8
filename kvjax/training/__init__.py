"""Training: the loop, the step, its memory, and the checks before it."""
