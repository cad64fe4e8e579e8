"""Attention patterns of heads on texts."""
