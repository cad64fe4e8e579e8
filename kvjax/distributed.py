"""Several processes as one job: how they find each other, agree, and end together.

They talk through JAX's coordination service, which process 0 holds: a store of keys, no device and
no collective. A job ends as one: what ends one process ends all, with one message and one status.

    0    trained to the end, or to `train.stop_after`
    2    something must be changed first (a UserError); the message says what
    75   saved on SIGTERM, or a process was lost: the same command goes on (EX_TEMPFAIL)
    130  saved on Ctrl-C: the same command goes on
    1    a bug, with its traceback

How long a loss can go unnoticed: gloo (CPU) sees a connection close at once or not at all, and the
coordination service ends every process that is left once one was silent for `heartbeat_seconds`,
or at once if it was process 0.
"""

import collections
from collections.abc import Callable
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any
from typing import NoReturn
import uuid

from etils import epath

from kvjax.errors import UserError

TRY_AGAIN = 75
STATUS = {signal.SIGTERM: TRY_AGAIN, signal.SIGINT: 130}
_ENDED = "kvjax/ended/"
_ALIVE = "kvjax/alive/"
_STOP = "kvjax/stop"
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
_LOST = re.compile("gloo|nccl|connection|socket|unavailable|heartbeat|peer", re.IGNORECASE)
_OWN = re.compile("RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED|out of memory", re.IGNORECASE)


# -- start -----------------------------------------------------------------------------------------


def start(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    connect_seconds: int = 300,
    heartbeat_seconds: int = 100,
) -> None:
    """Joins this process to its job, if there is one; call before the first use of a device.

    What is given counts, then KVJAX_COORDINATOR, KVJAX_NUM_PROCESSES and KVJAX_PROCESS_ID; without
    these Slurm's environment or a TPU pod's metadata, where they tell of more than one process; in
    a process that is alone nothing is started.

    Args:
      coordinator: host:port that process 0 listens on and all others reach.
      num_processes: of the whole job.
      process_id: this one's, from 0.
      connect_seconds: how long to wait for the others.
      heartbeat_seconds: how long a process may be silent before it counts as lost.

    Raises:
      UserError: half an address, a process that cannot be, a coordinator that does not answer.
    """
    given = dict(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
    for key, value in given.items():
        given[key] = _from_environment(key) if value is None else value
    missing = [key for key, value in given.items() if value is None]
    if len(missing) == len(given):
        where = _cluster()
        if where is None:
            return
    elif missing:
        there = [key for key in given if key not in missing]
        raise UserError(
            f"--{' and --'.join(there)} without --{' and --'.join(missing)}: give all three "
            "(process 0's host:port, how many processes there are, which one this is), or none "
            "on a TPU pod and under Slurm"
        )
    else:
        where = given | dict(cluster_detection_method="deactivate")
        _check(**given)
        if given["num_processes"] == 1:
            return
        if given["process_id"]:
            _reach(given["coordinator"], connect_seconds)
    import jax

    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # SIGTERM is `Interruption`'s; the service of JAX would take it too.
    jax.config.update("jax_enable_preemption_service", False)
    last_words.set(
        2,
        lambda: (
            f"no connection to all processes of the job within {connect_seconds} s: see which one "
            "did not start, and start all again"
        ),
    )
    if coordinator := where.pop("coordinator", None):
        where["coordinator_address"] = coordinator
    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=connect_seconds,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of the job could not be connected ({where}): {_first_line(error)}"
        ) from error
    last_words.set(TRY_AGAIN, lambda: _lost("see the lines above for which"))


def _from_environment(key: str) -> str | int | None:
    name = f"KVJAX_{key.upper()}"
    text = os.environ.get(name)
    if not text or key == "coordinator":
        return text or None
    if not text.isdigit():
        raise UserError(f"{name}={text}: must be a whole number")
    return int(text)


def _check(coordinator: str, num_processes: int, process_id: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"--coordinator={coordinator}: must be process 0's host:port, as node0:8476"
        )
    if num_processes < 1:
        raise UserError(f"--num_processes={num_processes}: must be at least 1")
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"--process_id={process_id}: must be 0 .. {num_processes - 1}, for "
            f"--num_processes={num_processes}"
        )


def _reach(coordinator: str, seconds: float) -> None:
    """Waits until the coordinator answers; JAX's own wait ends in a C++ abort."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--coordinator={coordinator}: no answer within {seconds} s ({error}); process "
                    "0 must run there, and the port be open between the hosts"
                ) from error
            time.sleep(0.5)


def _cluster() -> dict[str, Any] | None:
    """What `jax.distributed.initialize` must be told under a scheduler; None for one process."""
    env = os.environ
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or "1"
    if "SLURM_STEP_NODELIST" in env and int(tasks) > 1:
        return dict(cluster_detection_method="slurm", local_device_ids=_slurm_devices(env))
    if env.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    from jax._src.clusters import cloud_tpu_cluster as tpu  # nothing public says how many there are

    for cluster in (tpu.GkeTpuCluster, tpu.GceTpuCluster):
        if cluster.is_env_present():
            return {} if cluster.get_process_count() > 1 else None
    return None


def _slurm_devices(env: dict[str, str]) -> list[int] | None:
    """Which of the GPUs it sees a task takes; None: JAX's rule, GPU i for task i of a host.

    That rule is wrong for one task per host, which should have all, and for tasks that Slurm lets
    see one GPU each (--gpus-per-task=1).
    """
    visible = [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    per_host = env.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0]
    if len(visible) == 1:
        return [0]
    return list(range(len(visible))) if per_host == "1" and visible else None


# -- agreement -------------------------------------------------------------------------------------


def _state():
    from jax._src import distributed  # where Orbax looks too

    return distributed.global_state


def count() -> int:
    """Processes in the job, without touching a device."""
    state = _state()
    return state.num_processes if state.client is not None else 1


def index() -> int:
    """Which of them this is; 0 writes what one process writes."""
    return _state().process_id if count() > 1 else 0


def gather(name: str, text: str) -> list[str]:
    """What every process gave, by process, once all have; the same list everywhere.

    Waits as long as all of them live. All call it in the same order.

    Args:
      name: of this exchange, for the store.
    """
    if count() == 1:
        return [text]
    _exchanges[name] += 1
    key = f"kvjax/{name}/{_exchanges[name]}"
    _state().client.key_value_set(f"{key}/{index()}", text)
    return [_wait_for(f"{key}/{i}") for i in range(count())]


_exchanges = collections.Counter()


def _wait_for(key: str) -> str:
    from jax.errors import JaxRuntimeError

    while True:
        try:
            return _state().client.blocking_key_value_get(key, 5_000)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def check_same(given: dict[str, Any]) -> None:
    """Raises a UserError on every process unless all gave the same; names what differs.

    Args:
      given: what a process was started with, flat.
    """
    everyone = [json.loads(text) for text in gather("given", json.dumps(given, default=str))]
    rows = []
    for key in sorted(set().union(*everyone)):
        holders: dict[str, list[int]] = {}
        for process, theirs in enumerate(everyone):
            holders.setdefault(str(theirs.get(key)), []).append(process)
        if len(holders) > 1:
            shown = [f"{value} ({processes(who)})" for value, who in holders.items()]
            rows.append(f"  {key}: {', '.join(shown)}")
    if rows:
        rows, more = rows[:12], len(rows) - 12
        raise UserError(
            "the processes of this job were started differently:\n"
            + "\n".join(rows)
            + (f"\n  and {more} more" if more > 0 else "")
            + "\nGive all of them the same command and the same code"
        )


def processes(who: list[int]) -> str:
    """ "process 3", or "processes 0, 1, 2"."""
    return f"process{'es' if len(who) > 1 else ''} {', '.join(map(str, who))}"


def leaders(name: str, folder: epath.Path) -> list[int]:
    """By process, the first one that shares this folder with it: found out by files in it.

    Args:
      name: of this exchange, for the store.
      folder: made if missing; each process gives its own path to it.
    """
    if count() == 1:
        return [0]
    token = gather(f"{name}/token", uuid.uuid4().hex)[0]
    file = lambda process: folder / f".kvjax-{token}-{process}"
    folder.mkdir(parents=True, exist_ok=True)
    file(index()).write_text("")
    try:
        gather(f"{name}/written", "")
        found = next(i for i in range(count()) if i == index() or file(i).exists())
        return [int(text) for text in gather(f"{name}/found", str(found))]
    finally:
        file(index()).unlink(missing_ok=True)


def check_shared(workdir: epath.Path) -> None:
    """Raises a UserError on every process if one of them does not see the first one's workdir."""
    apart = [i for i, leader in enumerate(leaders("workdir", workdir)) if leader]
    if apart:
        raise UserError(
            f"--workdir={workdir}: {processes(apart)} of {count()} cannot see what process 0 "
            "writes there, and all processes write one checkpoint together. Give a folder that "
            "all hosts mount at the same place (NFS, Filestore, Lustre), or a bucket (gs://)"
        )


def once_per_folder(name: str, folder: epath.Path, action: Callable[[], Any]) -> Any:
    """Runs `action` on the first process of those that share a folder, then on the others.

    The others wait for as long as it takes: they find done what the first one did.

    Args:
      name: as in `leaders`, used once in the life of the job.
    """
    if count() == 1:
        return action()
    leader = leaders(name, folder)[index()]
    if leader == index():
        result = action()
        _state().client.key_value_set(f"kvjax/{name}/{leader}/done", "")
        return result
    _wait_for(f"kvjax/{name}/{leader}/done")
    return action()


class Interruption:
    """SIGTERM and Ctrl-C end a loop of steps, on all processes after the same step.

    A process is never more than one step ahead of another (it has the results of the step before
    the last, to which all contributed): whoever gets the signal while n steps are dispatched asks
    for the end after n + 2, and all have read that before they get there. It costs each process
    one look at the coordination service a step, while the devices compute.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None  # what the loop ended for
        self._agreed: signal.Signals | None = None
        self._received: signal.Signals | None = None
        self._asked = self._known = False
        self._stop_step: int | None = None

    @contextlib.contextmanager
    def watching(self):
        """Takes the signals; a second one ends the process."""

        def handle(number, frame):
            del frame
            self._received = signal.Signals(number)
            signal.signal(number, signal.SIG_DFL)

        before = {s: signal.signal(s, handle) for s in STATUS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def due(self, step: int) -> bool:
        """Whether the loop ends here; call before every step, with the steps dispatched so far."""
        if count() == 1:
            self.signal = self._received
            return self.signal is not None
        if not self._known:
            self._ask_and_look(step)
        if not self._known or step < self._stop_step:
            return False
        self.signal = self._agreed  # not before: a loop may end by itself first, on all processes
        return True

    def _ask_and_look(self, step: int) -> None:
        from jax.errors import JaxRuntimeError

        client = _state().client
        if self._received and not self._asked:
            self._asked = True
            with contextlib.suppress(JaxRuntimeError):  # another process was first
                client.key_value_set(_STOP, f"{step + 2} {self._received.name}")
        try:
            text = client.key_value_try_get(_STOP)
        except JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return
        step_text, name = text.split()
        self._stop_step, self._agreed, self._known = int(step_text), signal.Signals[name], True


# -- the end ---------------------------------------------------------------------------------------


class _LastWords:
    """What is said when C++ aborts this process: the coordination service does for lost peers.

    The handler is Python called from whatever thread aborts, so it stays short.
    """

    def __init__(self):
        self._status, self._text, self._handler = 1, str, None
        self.checkpoints: Callable[[], str] = str

    def set(self, status: int, text: Callable[[], str]) -> None:
        self._status, self._text = status, text
        if self._handler is None:
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._speak)
            ctypes.CDLL(None).signal(int(signal.SIGABRT), self._handler)

    def _speak(self, number: int) -> None:
        del number
        try:
            os.write(2, f"\nkvjax: {self._text()}\n".encode())
        finally:
            os._exit(self._status)


last_words = _LastWords()


def _lost(who: str) -> str:
    return (
        f"another process of this job was lost ({who}), and no step can be taken without it. "
        f"{last_words.checkpoints()}Run the same command on all hosts to go on"
    )


@contextlib.contextmanager
def ending_together():
    """Around all the work of a process: whatever ends it ends the whole job, with one message.

    Nothing but a signal or a crash of the interpreter is left to C++ heartbeats. In a job of one
    process it does nothing.
    """
    if count() == 1:
        yield
        return
    threading.excepthook = _one_line
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(finished,), daemon=True)
    watcher.start()
    try:
        yield
        gather("end", "")  # the first one draws curves; leaving before it would count as a loss
    except SystemExit:  # agreed upon, or before anything was shared
        raise
    except (UserError, OSError) as error:
        _end(str(error), 2)
    except BaseException as error:
        if type(error).__name__ == "JaxRuntimeError" and _is_loss(str(error)):
            time.sleep(_PATIENCE_SECONDS / 2)  # the one that stopped may say why: see `_watch`
            _end(f"{_lost(_silent())}. ({_first_line(error)})", TRY_AGAIN)
        traceback.print_exc()
        _end(f"{type(error).__name__}: {_first_line(error)}", 1)
    finally:
        finished.set()
        watcher.join()


def _is_loss(text: str) -> bool:
    """Whether a runtime's error says that another process is gone; memory may run out in NCCL."""
    return bool(_LOST.search(text)) and not _OWN.search(text)


def _one_line(args) -> None:
    """Instead of a traceback: a save under way fails in its thread when a process is lost."""
    reason = f"{args.exc_type.__name__}: {_first_line(args.exc_value)}"
    print(f"thread {args.thread and args.thread.name}: {reason}", file=sys.stderr, flush=True)


def _watch(finished: threading.Event) -> None:
    """Says that this process lives, and ends it when another one says that it has stopped."""
    client, beats = _state().client, 0
    while not finished.wait(_POLL_SECONDS):
        beats += 1
        try:
            client.key_value_set(f"{_ALIVE}{index()}", str(beats), allow_overwrite=True)
            ended = client.key_value_dir_get(_ENDED)
        except Exception:  # process 0 is gone: C++ has noticed too
            continue
        for key, text in ended:
            status, _, reason = text.partition(" ")
            who = key.rpartition("/")[2]
            if reason and who != str(index()):
                _leave(f"kvjax: process {who} stopped: {reason}", int(status))


def _silent() -> str:
    """Which processes have said nothing for a while."""
    client = _state().client
    try:
        before = dict(client.key_value_dir_get(_ALIVE))
        time.sleep(_PATIENCE_SECONDS / 2)
        after = dict(client.key_value_dir_get(_ALIVE))
    except Exception:
        return "process 0, the coordinator"
    who = [i for i in range(count()) if before.get(f"{_ALIVE}{i}") == after.get(f"{_ALIVE}{i}")]
    return processes(who) if who else "a connection broke; all processes still live"


def _end(reason: str, status: int) -> NoReturn:
    """Tells the others why this process ends, and ends it."""
    with contextlib.suppress(Exception):
        _state().client.key_value_set(f"{_ENDED}{index()}", f"{status} {reason}")
    _leave(f"kvjax: {reason}", status)


_leaving = threading.Lock()


def _leave(text: str, status: int) -> NoReturn:
    """Ends this process without the clean-up of JAX, which would wait for those that are gone.

    Process 0 stays a little: what the others have to hear is in its store.
    """
    _leaving.acquire()  # one message, whichever thread is first
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
    client = _state().client
    with contextlib.suppress(Exception):  # without a reason: it has heard of one
        client.key_value_set(f"{_ENDED}{index()}", f"{status} ")
    with contextlib.suppress(Exception):
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while index() == 0 and time.monotonic() < deadline:
            if len(client.key_value_dir_get(_ENDED)) == count():
                break
            time.sleep(0.1)
    os._exit(status)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
