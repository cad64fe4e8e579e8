"""Analyses attention in trained models: `python -m kvjax.analysis`.

`measures` computes numbers of a model; each of `reports` makes a `page.section.Section` of some;
`page` makes one HTML file of all sections.
"""
