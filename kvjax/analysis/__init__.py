"""What trained attention looks like inside: `python -m kvjax.analysis`.

`measures` has a module for each question; `reports` ask a model some of them and make a
`page.section.Section` of the answers; `page` makes one HTML file of all sections.
"""
