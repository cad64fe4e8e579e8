"""Resource limits of the calling process."""

import resource


def limit(*, memory_bytes: int | None, cpu_seconds: int, processes: int | None) -> None:
    """Lowers soft and hard limits; the limit on processes has no effect for root.

    Args:
      memory_bytes: address space; None for a runtime that reserves far more than it uses.
      cpu_seconds: SIGXCPU after this time, SIGKILL one second later.
      processes: maximum of the user's processes and threads; None if the runtime starts threads.
    """
    for name, soft, hard in (
        ("AS", memory_bytes, memory_bytes),
        ("CPU", cpu_seconds, cpu_seconds + 1),
        ("FSIZE", 0, 0),
        ("NOFILE", 32, 32),
        ("CORE", 0, 0),
        ("NPROC", processes, processes),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None and soft is not None:
            maximum = resource.getrlimit(kind)[1]
            if maximum >= 0:  # negative: unlimited
                soft, hard = min(soft, maximum), min(hard, maximum)
            resource.setrlimit(kind, (soft, hard))
