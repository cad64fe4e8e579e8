"""Chat in the terminal: `python -m kvjax.chat`."""
