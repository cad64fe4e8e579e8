"""The end of a job: whatever ends one process ends all, with one message and one status."""

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
_OWN = re.compile("RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED|out of memory", re.IGNORECASE)


class _AbortMessage:
    """What is said when C++ aborts this process: the coordination service does for lost peers.

    The handler is Python called from whatever thread aborts, so it stays short.
    """

    def __init__(self):
        self._handler = None
        self.checkpoints: Callable[[], str] = str

    def set(self, status: int, text: Callable[[], str]) -> None:
        self._status, self._text = status, text
        if self._handler is None:
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._speak)
            ctypes.CDLL(None).signal(int(signal.SIGABRT), self._handler)

    def _speak(self, number: int) -> None:
        del number
        try:
            if text := self._text():
                os.write(2, f"\nkvjax: {text}\n".encode())
        finally:
            os._exit(self._status)


abort_message = _AbortMessage()


def lost(who: str) -> str:
    """What to say of a process that is gone.

    Args:
      who: which one, or how to find out.
    """
    return (
        f"another process of this job was lost ({who}), and no step can be taken without it. "
        f"{abort_message.checkpoints()}Run the same command on all hosts to go on"
    )


@contextlib.contextmanager
def end_together():
    """Around all the work of a process: whatever ends it ends the whole job, with one message.

    Nothing but a signal or a crash of the interpreter is left to C++ heartbeats. In a job of one
    process it does nothing.
    """
    if agreement.count() == 1:
        yield
        return
    threading.excepthook = _one_line
    logging.getLogger("absl").addFilter(_without_traceback)
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(finished,), daemon=True)
    watcher.start()
    try:
        yield
        # The first one draws curves; leaving before it would count as a loss.
        agreement.gather("end", "")
    except SystemExit:  # agreed upon, or before anything was shared
        raise
    except BaseException as error:
        expected = isinstance(error, (UserError, OSError))
        if isinstance(error, KeyboardInterrupt) or (interrupted.received() and not expected):
            _end("interrupted", interrupted.STATUS)
        if (loss := _loss_behind(error)) is not None:
            time.sleep(_PATIENCE_SECONDS / 2)  # the one that stopped may say why: see `_watch`
            _end(f"{lost(_silent())}. ({first_line(loss)})", TRY_AGAIN)
        if expected:
            _end(str(error), 2)
        traceback.print_exc()
        _end(f"{type(error).__name__}: {first_line(error)}", 1)
    finally:
        finished.set()
        watcher.join()


def _loss_behind(error: BaseException | None) -> BaseException | None:
    """The runtime's error, this one or a cause of it, that says that another process is gone.

    A checkpoint that could not be written says so in an OSError, whose cause may be that.
    """
    while error is not None:
        if type(error).__name__ == "JaxRuntimeError" and _is_loss(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_loss(text: str) -> bool:
    """Whether a runtime's error says that another process is gone; memory may run out in NCCL."""
    return bool(_LOST.search(text)) and not _OWN.search(text)


def _one_line(args) -> None:
    """Instead of a traceback: a save under way fails in its thread when a process is lost."""
    reason = f"{args.exc_type.__name__}: {first_line(args.exc_value)}"
    print(f"thread {args.thread and args.thread.name}: {reason}", file=sys.stderr, flush=True)


def _without_traceback(record: logging.LogRecord) -> bool:
    """The same for what Orbax logs of it; what ends this process comes with its own traceback."""
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        said = f"{record.getMessage()} {type(error).__name__}: {first_line(error)}"
        record.msg, record.args, record.exc_info = said, (), None
    return True


def _watch(finished: threading.Event) -> None:
    """Says that this process lives, and ends it when another one says that it has stopped."""
    client, beats = agreement.client(), 0
    while not finished.wait(_POLL_SECONDS):
        beats += 1
        try:
            client.key_value_set(f"{_ALIVE}{agreement.index()}", str(beats), allow_overwrite=True)
            ended = client.key_value_dir_get(_ENDED)
        except Exception:  # process 0 is gone: C++ has noticed too
            continue
        for key, text in ended:
            status, _, reason = text.partition(" ")
            who = key.rpartition("/")[2]
            if reason and who != str(agreement.index()):
                _leave(f"process {who} stopped: {reason}", int(status))


def _silent() -> str:
    """Which processes have said nothing for a while."""
    client = agreement.client()
    try:
        before = dict(client.key_value_dir_get(_ALIVE))
        time.sleep(_PATIENCE_SECONDS / 2)
        after = dict(client.key_value_dir_get(_ALIVE))
    except Exception:
        return "process 0, the coordinator"
    names = [f"{_ALIVE}{i}" for i in range(agreement.count())]
    who = [i for i, name in enumerate(names) if before.get(name) == after.get(name)]
    return agreement.processes(who) if who else "a connection broke; all processes still live"


def _end(reason: str, status: int) -> NoReturn:
    """Tells the others why this process ends, and ends it."""
    abort_message.set(status, lambda: reason)  # process 0 may hear of it, and be gone, before
    with contextlib.suppress(Exception):
        agreement.client().key_value_set(f"{_ENDED}{agreement.index()}", f"{status} {reason}")
    _leave(reason, status)


_leaving = threading.Lock()


def _leave(text: str, status: int) -> NoReturn:
    """Ends this process without the clean-up of JAX, which would wait for those that are gone.

    Process 0 stays a little: what the others have to hear is in its store.
    """
    _leaving.acquire()  # one message, whichever thread is first
    abort_message.set(status, lambda: text)
    say(text)
    abort_message.set(status, str)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    client = agreement.client()
    with contextlib.suppress(Exception):  # without a reason: it has heard of one
        client.key_value_set(f"{_ENDED}{agreement.index()}", f"{status} ")
    with contextlib.suppress(Exception):
        if agreement.index() == 0:
            _stay(client)
    os._exit(status)


def _stay(client) -> None:
    """Returns when all have ended, or those that have not are silent."""
    beats, deadline = None, 0.0
    while len(ended := dict(client.key_value_dir_get(_ENDED))) < agreement.count():
        name = lambda key: key.rpartition("/")[2]
        over = {name(key) for key in ended}
        left = {k: n for k, n in client.key_value_dir_get(_ALIVE) if name(k) not in over}
        if left != beats:  # on a busy machine one may take long to hear of it
            beats, deadline = left, time.monotonic() + _PATIENCE_SECONDS
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
