"""Comparisons with other authors' attention modules: clones, weights, the code that runs theirs."""
