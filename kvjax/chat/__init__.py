"""A conversation in the terminal: `python -m kvjax.chat`."""
