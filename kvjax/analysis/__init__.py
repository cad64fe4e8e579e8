"""What trained attention looks like inside: `python -m kvjax.analysis`.

`measures` are pure functions on arrays in float64, a module for each question; `reports` measure a
model with them and make a `page.section.Section` of each; `page` makes one HTML file of them all.
"""
