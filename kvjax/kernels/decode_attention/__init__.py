"""Softmax attention of T new queries over a compressed cache, for every mechanism.

`readings/` says what is computed: one file per way of reading a cache. `reference.py` defines it,
and `api.py` chooses the implementation. `xla.py` takes all; `tpu/` and `gpu/` are Pallas kernels.
"""
