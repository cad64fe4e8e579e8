"""Keys cut at low rank: what a fixed subspace of a head's keys can hold."""
