"""How alike the query, key and value projections of a layer are."""
