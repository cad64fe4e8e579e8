"""Softmax attention of T new queries over a compressed cache, for every mechanism.

`cache_layouts/` has the maths, one file per cache layout; `reference.py` is the definition.
`api.py` chooses an implementation: `xla.py` for all layouts, or the Pallas kernels of `tpu/` and
`gpu/`.
"""
