"""What a model costs, from its shapes; `python -m kvjax.costs` prints it."""
