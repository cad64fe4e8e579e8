"""How a process finds its job, and what is refused; with real processes: test_multihost.py."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import types

import absl.logging
import jax
import pytest

from kvjax import distributed
from kvjax.distributed import agreement
from kvjax.distributed import ending
from kvjax.distributed import joining
from kvjax.foundation.errors import UserError

NOWHERE = dict(KVJAX_COORDINATOR="", KVJAX_NUM_PROCESSES="", KVJAX_PROCESS_ID="")
SLURM = dict(SLURM_STEP_NODELIST="gpu[1-2]", SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="3")


@pytest.fixture
def started(monkeypatch):
    """What `jax.distributed.initialize` is called with; it does nothing."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: calls.append(kwargs))
    monkeypatch.setattr(distributed.last_words, "set", lambda *args: None)
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in (NOWHERE | dict(JAX_PLATFORMS="cpu")).items():
        monkeypatch.setenv(name, value)
    return calls


def test_alone_nothing_is_started(started):
    distributed.start()
    distributed.start(coordinator="node0:1234", num_processes=1, process_id=0)
    assert started == []
    assert (distributed.count(), distributed.index()) == (1, 0)


def test_flags(started):
    distributed.start(coordinator="node0:1234", num_processes=4, process_id=0, heartbeat_seconds=7)
    (call,) = started
    assert call["coordinator_address"] == "node0:1234"
    assert (call["num_processes"], call["process_id"]) == (4, 0)
    assert call["heartbeat_timeout_seconds"] == 7


def test_the_environment_fills_what_flags_leave(started, monkeypatch):
    monkeypatch.setenv("KVJAX_COORDINATOR", "node0:1234")
    monkeypatch.setenv("KVJAX_NUM_PROCESSES", "4")
    distributed.start(process_id=0)
    assert (started[0]["coordinator_address"], started[0]["num_processes"]) == ("node0:1234", 4)
    monkeypatch.setenv("KVJAX_NUM_PROCESSES", "four")
    with pytest.raises(UserError, match="KVJAX_NUM_PROCESSES=four: must be a whole number"):
        distributed.start(process_id=0)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(coordinator="a:1"), "--coordinator without --num_processes and --process_id"),
        (dict(process_id=0), "--process_id without --coordinator and --num_processes"),
        (dict(coordinator="a", num_processes=2, process_id=0), "must be process 0's host:port"),
        (dict(coordinator=":1", num_processes=2, process_id=0), "must be process 0's host:port"),
        (dict(coordinator="a:70000", num_processes=2, process_id=0), "host:port"),
        (dict(coordinator="a:1", num_processes=0, process_id=0), "num_processes=0: must be at le"),
        (dict(coordinator="a:1", num_processes=2, process_id=2), r"process_id=2: must be 0 .. 1"),
        (dict(coordinator="a:1", num_processes=2, process_id=-1), r"process_id=-1: must be 0 .."),
    ],
)
def test_bad_flags(started, given, message):
    with pytest.raises(UserError, match=message):
        distributed.start(**given)
    assert not started


def test_a_coordinator_that_does_not_answer(started):
    with socket.socket() as s:  # bound, not listening
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
        given = dict(coordinator=address, num_processes=2, process_id=1)
        with pytest.raises(UserError, match=f"{address}: no answer within 1 s"):
            distributed.start(**given, connect_seconds=1)
    assert not started


def test_slurm(started, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    distributed.start()
    assert started[0]["cluster_detection_method"] == "slurm"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    distributed.start()
    assert len(started) == 1


@pytest.mark.parametrize(
    "per_host, visible, expected",
    [
        ("8(x2)", "0,1,2,3,4,5,6,7", None),  # GPU i for task i: JAX's rule
        ("8(x2)", "", None),
        ("8(x2)", "3", [0]),  # --gpus-per-task=1: it sees its own only
        ("1(x2)", "0,1,2,3", [0, 1, 2, 3]),  # one task for all GPUs of a host
        ("1", "0,1", [0, 1]),
        ("1(x2)", "", None),
    ],
)
def test_gpus_of_a_slurm_task(per_host, visible, expected):
    env = dict(SLURM_STEP_TASKS_PER_NODE=per_host, CUDA_VISIBLE_DEVICES=visible)
    assert joining._slurm_devices(env) == expected


@pytest.mark.parametrize("workers, expected", [(1, 0), (4, 1)])
def test_a_tpu_pod_has_more_than_one_worker(started, monkeypatch, workers, expected):
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.delenv("JAX_PLATFORMS")
    pod = cloud_tpu_cluster.GkeTpuCluster
    monkeypatch.setattr(pod, "is_env_present", classmethod(lambda cls: True))
    monkeypatch.setattr(pod, "get_process_count", classmethod(lambda cls: workers))
    distributed.start()
    assert len(started) == expected


class Store:
    """The coordination service's keys, as far as one process uses them here."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_alone_stops_before_its_next_step(number):
    """A second signal is left to the system, which ends the process; SIGHUP comes in twos."""
    before = signal.getsignal(number)
    interruption = distributed.Interruption()
    with interruption.watching():
        assert not interruption.due(0)
        signal.raise_signal(number)
        assert interruption.due(1) and interruption.signal is number
        hangup = number == signal.SIGHUP
        assert signal.getsignal(number) == (signal.SIG_IGN if hangup else signal.SIG_DFL)
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored():
    """SIGHUP under `nohup`, Ctrl-C in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interruption = distributed.Interruption()
        with interruption.watching():
            signal.raise_signal(signal.SIGHUP)
            assert not interruption.due(0)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("who", [0, 1])
def test_all_stop_after_the_same_step(monkeypatch, ahead, who):
    """Two processes, the second `ahead` steps further on, one of them told at step 5."""
    store = Store()
    state = types.SimpleNamespace(client=store, num_processes=2, process_id=0)
    monkeypatch.setattr(agreement, "_state", lambda: state)
    both = [distributed.Interruption(), distributed.Interruption()]
    ended = [None, None]
    for step in range(20):
        for i, interruption in enumerate(both):
            mine = step + (ahead if i else 0)
            if i == who and mine == 5:
                interruption._received = signal.SIGTERM
            if ended[i] is None and interruption.due(mine):
                ended[i] = mine
    assert ended == [7, 7]
    assert {i.signal for i in both} == {signal.SIGTERM}


def test_the_first_of_two_signals_counts(monkeypatch):
    state = types.SimpleNamespace(client=Store(), num_processes=2, process_id=0)
    monkeypatch.setattr(agreement, "_state", lambda: state)
    one, other = distributed.Interruption(), distributed.Interruption()
    one._received, other._received = signal.SIGINT, signal.SIGTERM
    assert [one.due(3), other.due(4), one.due(4), other.due(5), one.due(5)] == [
        *(False, False, False),
        *(True, True),
    ]
    assert one.signal is other.signal is signal.SIGINT
    assert distributed.STATUS == {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGHUP: 129}


def test_a_loop_that_ends_by_itself_first_ends_for_no_signal(monkeypatch):
    """As on the other processes, of which some have not heard of it."""
    state = types.SimpleNamespace(client=Store(), num_processes=2, process_id=0)
    monkeypatch.setattr(agreement, "_state", lambda: state)
    interruption = distributed.Interruption()
    interruption._received = signal.SIGTERM
    assert not interruption.due(3) and not interruption.due(4)
    assert interruption.signal is None
    assert interruption.due(5) and interruption.signal is signal.SIGTERM


@pytest.mark.parametrize(
    "text, lost",
    [
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", True),
        ("UNAVAILABLE: heartbeat timeout", True),
        ("RESOURCE_EXHAUSTED: NCCL could not allocate", False),
        ("INTERNAL: ncclInternalError: out of memory", False),
        ("INVALID_ARGUMENT: peer access", False),
        ("INTERNAL: something else", False),
    ],
)
def test_what_counts_as_a_lost_process(text, lost):
    assert ending._is_loss(text) == lost


def test_what_a_library_logs_of_a_loss_is_one_line(caplog):
    logger = absl.logging.get_absl_logger()
    logger.addFilter(ending._without_traceback)
    try:
        with caplog.at_level("ERROR", logger="absl"):
            try:
                raise OSError("the barrier failed\nand pages of addresses")
            except OSError:
                absl.logging.exception("step %d: finalize failed.", 10)
            absl.logging.error("step %d: no exception", 20)
    finally:
        logger.removeFilter(ending._without_traceback)
    assert caplog.messages == [
        "step 10: finalize failed. OSError: the barrier failed",
        "step 20: no exception",
    ]
    assert "Traceback" not in caplog.text


def test_last_words():
    """An abort from C++ ends with a sentence and the status that was set."""
    code = (
        "import os, sys\n"
        "from kvjax import distributed\nfrom kvjax.distributed import ending\n"
        "distributed.last_words.checkpoints = lambda: 'Checkpoints of steps [7] are here. '\n"
        "distributed.last_words.set(75, lambda: ending.lost('who knows'))\n"
        "os.abort()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 75
    assert run.stderr == (
        "\nkvjax: another process of this job was lost (who knows), and no step can be taken "
        "without it. Checkpoints of steps [7] are here. Run the same command on all hosts to go "
        "on\n"
    )


def test_programs_that_differ_are_named(monkeypatch):
    texts = {"training step": "all_reduce", "evaluation step": "add"}
    distributed.check_same_programs(texts)
    theirs = dict.fromkeys(texts, hashlib.sha256(b"add").hexdigest()[:12])
    monkeypatch.setattr(agreement, "gather", lambda name, mine: [mine, json.dumps(theirs)])
    with pytest.raises(
        UserError, match=r"training step: \w+ \(process 0\), \w+ \(process 1\)"
    ) as e:
        distributed.check_same_programs(texts)
    assert "evaluation step" not in str(e.value)


def test_one_process_agrees_with_itself(tmp_path):
    assert distributed.gather("x", "y") == ["y"]
    distributed.check_same({"a": 1})
    assert distributed.leaders("x", tmp_path / "none") == [0]
    assert not (tmp_path / "none").exists()
    assert distributed.once_per_folder("x", tmp_path, lambda: 3) == 3
    with pytest.raises(UserError, match="mine"), distributed.ending_together():
        raise UserError("mine")
