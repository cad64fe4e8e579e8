"""What a candidate may use."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budgets of one judgement; past one of them both interpreters are killed.

    How deep values may be nested is `inside.values.NESTING`.
    """

    seconds: float = 5.0  # of both together, once they have started
    cpu_seconds: int = 5  # of each
    memory_bytes: int = 256 << 20  # of each
    output_bytes: int = 1 << 20  # that each replies in all
    start_seconds: float = 60.0  # to start on a busy machine
    retries: int = 1  # after `seconds` were not enough: the machine may have been busy
