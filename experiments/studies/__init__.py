"""Training runs that compare mechanisms."""
