"""Report on the similarity of a layer's query, key and value projections."""
