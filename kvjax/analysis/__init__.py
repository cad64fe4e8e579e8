"""What trained attention looks like inside: `python -m kvjax.analysis`.

`heads` and `activations` give arrays in float64, one layer at a time; pure functions on those
arrays stand in a module for each question (`diversity`, `geometry`, `logits`, ...); `reports` make
a `section.Section` of each, and `page` one HTML file of them all.
"""
