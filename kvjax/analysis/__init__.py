"""Analyses attention in trained models: `python -m kvjax.analysis`.

`measures` computes numbers from a model. Each of `reports` shows some of them as figures and
tables, a `page.section.Section`. `page` writes all sections as one HTML file.
"""
