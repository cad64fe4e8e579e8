"""Resource limits of the calling process: layer R."""

import resource


def limit(*, memory_bytes: int | None, cpu_seconds: int, processes: int | None) -> None:
    """Lowers soft and hard limits; processes are not limited for root by any kernel.

    Args:
      memory_bytes: of address space; None where a runtime reserves far more than it uses.
      cpu_seconds: SIGXCPU then, SIGKILL a second later.
      processes: and threads, of the user; None where a runtime starts threads of its own.
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
            most = resource.getrlimit(kind)[1]
            lower = lambda value, most=most: value if most < 0 else min(value, most)
            resource.setrlimit(kind, (lower(soft), lower(hard)))
