"""What is logged once, however often it happens."""

import functools
import logging


@functools.cache
def log_once(logger: str, level: int, message: str) -> None:
    """Logs a message the first time that it comes.

    Args:
      logger: its name, the module's `__name__`.
      level: of `logging`; from WARNING on it is seen without any set-up.
    """
    logging.getLogger(logger).log(level, "%s", message)
