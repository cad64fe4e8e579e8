"""Bases and residuals of LRKV: how large they are, whether they point apart, and how they grew."""
