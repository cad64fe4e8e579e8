"""Draws figures, and writes sections of figures and tables as one self-contained HTML file."""
