"""What five papers claim, and the rules by which results decide; see `experiments.claims`."""
