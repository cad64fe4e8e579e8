"""Softmax attention of T new queries over a compressed cache, for every mechanism.

`readings/` says what is computed, one file per way of reading a cache, `reference.py` defines it,
`api.py` dispatches, `xla.py` is the implementation that always works.
"""
