"""Claims of four papers and a blog, and the rules by which results judge them."""
