"""Training: the loop, the step, the memory it takes, and what is checked before it starts."""
