"""How a process finds its job, and what is refused; with real processes: test_multihost.py."""

import os
import socket

import jax
import pytest

from kvjax import distributed
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
