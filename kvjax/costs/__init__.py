"""Costs of a model from its shapes; `python -m kvjax.costs` prints them."""
