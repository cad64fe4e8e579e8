"""Tables and figures from shapes, compilers and saved results."""
