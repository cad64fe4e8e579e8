"""Conversations as tokens: specials, rendering with a loss mask, published sets, a calculator."""
