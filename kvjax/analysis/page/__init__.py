"""Sections of reports, and one self-contained HTML file of them."""
