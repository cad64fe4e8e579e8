"""Limits of a judgement."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budgets of one judgement; both interpreters are killed when one is exceeded.

    The nesting depth of values is limited by `inside.values.NESTING`.
    """

    seconds: float = 5.0  # wall time after both have started
    cpu_seconds: int = 5  # per interpreter
    memory_bytes: int = 256 << 20  # per interpreter
    output_bytes: int = 1 << 20  # total of replies per interpreter
    start_seconds: float = 60.0  # wall time for both to start, on a busy machine
    retries: int = 1  # after a timeout that a busy machine may have caused
