"""Several processes as one job: they connect, agree, and end together.

Processes exchange text through JAX's coordination service, a key-value store in process 0, without
devices or collectives. If one process ends, all end, each with one message and an exit status:

    0    trained to the end, or to `train.stop_after`
    2    a user error; the message says what to change
    75   saved on SIGTERM, or a process was lost: the same command resumes (EX_TEMPFAIL)
    130  saved on Ctrl-C (before the first step there is nothing to save); resumes likewise
    129  saved when its terminal closed (SIGHUP; not under `nohup`); resumes likewise
    1    a bug, with its traceback

The loss of a process is noticed at once if gloo (on CPU) sees its connection close, or if it was
process 0. Otherwise the coordination service ends the other processes after `heartbeat_seconds`
without a heartbeat.
"""

from kvjax.distributed.agreement import (
    Team,
    check_same,
    check_same_rows,
    check_shared,
    count,
    folder_leaders,
    gather,
    index,
    processes,
)
from kvjax.distributed.ending import end_together
from kvjax.distributed.interruption import STATUS, TRY_AGAIN, Interruption
from kvjax.distributed.joining import start

__all__ = [
    "STATUS",
    "TRY_AGAIN",
    "Interruption",
    "Team",
    "check_same",
    "check_same_rows",
    "check_shared",
    "count",
    "end_together",
    "folder_leaders",
    "gather",
    "index",
    "processes",
    "start",
]
