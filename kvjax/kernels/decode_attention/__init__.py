"""Softmax attention of T new queries over a compressed cache, for every mechanism.

`operands.py` says what is computed, `reference.py` defines it, `api.py` dispatches, `xla.py` is the
implementation that always works.
"""
