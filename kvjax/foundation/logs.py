"""Logging of repeated messages."""

import functools
import logging


@functools.cache
def log_once(logger: str, level: int, message: str) -> None:
    """Logs a message the first time only.

    Args:
      logger: its name, the module's `__name__`.
      level: a level of `logging`; by default, WARNING and above are shown.
    """
    logging.getLogger(logger).log(level, "%s", message)
