"""Several processes as one job: how they find each other, agree, and end together.

They talk through JAX's coordination service, which process 0 holds: a store of keys, no device and
no collective. A job ends as one: what ends one process ends all, with one message and one status.

    0    trained to the end, or to `train.stop_after`
    2    something must be changed first (a UserError); the message says what
    75   saved on SIGTERM, or a process was lost: the same command goes on (EX_TEMPFAIL)
    130  saved on Ctrl-C, or before the first step nothing to save: the same command goes on
    129  saved when its terminal closed (SIGHUP; not under `nohup`): the same command goes on
    1    a bug, with its traceback

How long a loss can go unnoticed: gloo (CPU) sees a connection close at once or not at all, and the
coordination service ends every process that is left once one was silent for `heartbeat_seconds`,
or at once if it was process 0.
"""

from kvjax.distributed.agreement import (
    Team,
    check_same,
    check_same_programs,
    check_same_rows,
    check_shared,
    count,
    folder_leaders,
    gather,
    index,
    processes,
)
from kvjax.distributed.ending import abort_message, end_together
from kvjax.distributed.interruption import STATUS, TRY_AGAIN, Interruption
from kvjax.distributed.joining import start

__all__ = [
    "STATUS",
    "TRY_AGAIN",
    "Interruption",
    "Team",
    "abort_message",
    "check_same",
    "check_same_programs",
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
