"""Similarity of a layer's query, key and value projections."""
