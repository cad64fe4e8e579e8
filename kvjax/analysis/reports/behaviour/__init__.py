"""Report on the attention patterns of heads on texts."""
