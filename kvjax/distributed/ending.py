"""Ends all processes of a job if one of them ends with an error, with one message and status."""

from collections.abc import Callable
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

from kvjax.distributed import agreement
from kvjax.distributed.interruption import TRY_AGAIN
from kvjax.foundation import interrupted
from kvjax.foundation.command_line import say
from kvjax.foundation.errors import UserError, first_line

_ENDED = "kvjax/ended/"
_ALIVE = "kvjax/alive/"
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
_LOST = re.compile("gloo|nccl|connection|socket|unavailable|heartbeat|peer", re.IGNORECASE)
_LOCAL = re.compile(
    "RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED|out of memory", re.IGNORECASE
)


class _AbortMessage:
    """Prints a message when C++ aborts this process.

    JAX's coordination service aborts it when another process is lost. The signal handler is Python
    code that runs in the aborting thread, so it is short.
    """

    def __init__(self):
        self._handler = None

    def set(self, status: int, text: Callable[[], str]) -> None:
        """Sets exit status and message of an abort; the first call installs the handler."""
        self._status, self._text = status, text
        if self._handler is None:
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._print_and_exit)
            ctypes.CDLL(None).signal(int(signal.SIGABRT), self._handler)

    def _print_and_exit(self, number: int) -> None:
        del number
        try:
            if text := self._text():
                os.write(2, f"\nkvjax: {text}\n".encode())
        finally:
            os._exit(self._status)


abort_message = _AbortMessage()


def lost_message(who: str) -> str:
    """Returns the message for a lost process.

    Args:
      who: names the lost process, or says where to find its name.
    """
    return (
        f"another process of this job was lost ({who}), and no step can be taken without it. "
        "Run the same command on all hosts to resume"
    )


@contextlib.contextmanager
def end_together():
    """Ends the whole job, with one message, if the block raises an exception.

    Does nothing in a job of one process. If a process is killed or its interpreter crashes, the
    others notice it by JAX's heartbeats.
    """
    if agreement.count() == 1:
        yield
        return
    threading.excepthook = _print_thread_exception
    logging.getLogger("absl").addFilter(_shorten_exception)
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(finished,), daemon=True)
    watcher.start()
    try:
        yield
        # Waits for process 0, which still draws curves: leaving earlier would count as a loss.
        agreement.gather("end", "")
    except SystemExit:  # after an agreed signal, or before the processes exchanged anything
        raise
    except BaseException as error:
        expected = isinstance(error, (UserError, OSError))
        if isinstance(error, KeyboardInterrupt) or (interrupted.received() and not expected):
            _publish_and_exit("interrupted", interrupted.STATUS)
        if (loss := _lost_process_error(error)) is not None:
            # If the other process stopped with an error, it publishes that, and `_watch` ends this
            # process with the reason.
            time.sleep(_PATIENCE_SECONDS / 2)
            _publish_and_exit(
                f"{lost_message(_silent_processes())}. ({first_line(loss)})", TRY_AGAIN
            )
        if expected:
            _publish_and_exit(str(error), 2)
        traceback.print_exc()
        _publish_and_exit(f"{type(error).__name__}: {first_line(error)}", 1)
    finally:
        finished.set()
        watcher.join()


def _lost_process_error(error: BaseException | None) -> BaseException | None:
    """Returns the runtime error that a lost process has caused, or None.

    Looks through an error and its causes, since a checkpoint's OSError may hide it. Ignores errors
    that are this process's own, such as NCCL's when memory is short.
    """
    while error is not None:
        text = str(error)
        is_loss = _LOST.search(text) and not _LOCAL.search(text)
        if type(error).__name__ == "JaxRuntimeError" and is_loss:
            return error
        error = error.__cause__ or error.__context__
    return None


def _print_thread_exception(args) -> None:
    """Prints a thread's exception as one line; a lost process makes pending saves fail this way."""
    reason = f"{args.exc_type.__name__}: {first_line(args.exc_value)}"
    print(f"thread {args.thread and args.thread.name}: {reason}", file=sys.stderr, flush=True)


def _shorten_exception(record: logging.LogRecord) -> bool:
    """Shortens logged exceptions to one line; `end_together` prints the traceback that matters."""
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        text = f"{record.getMessage()} {type(error).__name__}: {first_line(error)}"
        record.msg, record.args, record.exc_info = text, (), None
    return True


def _watch(finished: threading.Event) -> None:
    """Publishes heartbeats, and ends this process when another one publishes that it has ended."""
    client, beats = agreement.client(), 0
    while not finished.wait(_POLL_SECONDS):
        beats += 1
        try:
            client.key_value_set(f"{_ALIVE}{agreement.index()}", str(beats), allow_overwrite=True)
            ended = client.key_value_dir_get(_ENDED)
        except Exception:  # process 0 is gone, which C++ notices too
            continue
        for key, text in ended:
            status, _, reason = text.partition(" ")
            who = key.rpartition("/")[2]
            if reason and who != str(agreement.index()):
                _say_and_exit(f"process {who} stopped: {reason}", int(status))


def _silent_processes() -> str:
    """Names the processes whose heartbeats have stopped."""
    client = agreement.client()
    try:
        before = dict(client.key_value_dir_get(_ALIVE))
        time.sleep(_PATIENCE_SECONDS / 2)
        after = dict(client.key_value_dir_get(_ALIVE))
    except Exception:
        return "process 0, the coordinator"
    names = [f"{_ALIVE}{i}" for i in range(agreement.count())]
    silent = [i for i, name in enumerate(names) if before.get(name) == after.get(name)]
    return agreement.processes(silent) if silent else "a connection broke; all processes still live"


def _publish_and_exit(reason: str, status: int) -> NoReturn:
    """Publishes why this process ends, and ends it."""
    # Set first: once the reason is published, process 0 may exit, which aborts this process.
    abort_message.set(status, lambda: reason)
    with contextlib.suppress(Exception):
        agreement.client().key_value_set(f"{_ENDED}{agreement.index()}", f"{status} {reason}")
    _say_and_exit(reason, status)


_leaving = threading.Lock()


def _say_and_exit(text: str, status: int) -> NoReturn:
    """Prints a message and exits without JAX's clean-up, which would wait for lost processes.

    Process 0 stays until the others have read its store.
    """
    _leaving.acquire()  # never released: only the first thread prints
    abort_message.set(status, lambda: text)
    say(text)
    abort_message.set(status, str)  # the message is out: an abort prints nothing more
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    client = agreement.client()
    with contextlib.suppress(Exception):  # without the reason, which has been published
        client.key_value_set(f"{_ENDED}{agreement.index()}", f"{status} ")
    with contextlib.suppress(Exception):
        if agreement.index() == 0:
            _wait_for_others(client)
    os._exit(status)


def _wait_for_others(client) -> None:
    """Waits until all other processes have ended or stopped their heartbeats."""

    def process(key: str) -> str:
        return key.rpartition("/")[2]

    beats, deadline = None, 0.0
    while len(ended := dict(client.key_value_dir_get(_ENDED))) < agreement.count():
        gone = {process(key) for key in ended}
        living = {k: n for k, n in client.key_value_dir_get(_ALIVE) if process(k) not in gone}
        if living != beats:  # new heartbeats: a process on a busy machine may be slow to end
            beats, deadline = living, time.monotonic() + _PATIENCE_SECONDS
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
