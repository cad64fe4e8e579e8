"""Connecting a process to its job; with real processes: test_multihost.py."""

import os
import socket

import jax
import pytest

from kvjax import distributed
from kvjax.distributed import ending
from kvjax.foundation.errors import UserError

NOWHERE = dict(KVJAX_COORDINATOR="", KVJAX_NUM_PROCESSES="", KVJAX_PROCESS_ID="")
SLURM = dict(SLURM_STEP_NODELIST="gpu[1-2]", SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="3")
NO_CONNECTION = (
    "not all processes of the job connected within {} s: see which one did not start, and start "
    "all again"
)


class Started(list):
    """Calls of a `jax.distributed.initialize` that only raises `error`, if it is set.

    Attributes:
      options: JAX's options that were set, by name.
      aborts: (status, text) of each abort message that was set.
    """

    def __init__(self):
        self.options, self.aborts, self.error = {}, [], None

    def initialize(self, **arguments):
        self.append(arguments)
        if self.error:
            raise self.error


@pytest.fixture
def started(monkeypatch):
    calls = Started()

    def set_message(status, text):
        calls.aborts.append((status, text()))

    monkeypatch.setattr(jax.distributed, "initialize", calls.initialize)
    monkeypatch.setattr(ending.abort_message, "set", set_message)
    monkeypatch.setattr(jax.config, "update", calls.options.__setitem__)
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in (NOWHERE | dict(JAX_PLATFORMS="cpu")).items():
        monkeypatch.setenv(name, value)
    return calls


def test_alone_nothing_is_started(started):
    distributed.start()
    distributed.start(coordinator="node0:1234", num_processes=1, process_id=0)
    assert started == [] and not started.options and not started.aborts


def test_options_of_jax_distributed(started, monkeypatch):
    """Flags precede the environment; gloo is chosen for CPUs only."""
    distributed.start(
        coordinator="node0:65535",
        num_processes=4,
        process_id=0,
        heartbeat_seconds=7,
        connect_seconds=9,
    )
    monkeypatch.setenv("KVJAX_COORDINATOR", "[::1]:1")
    monkeypatch.setenv("KVJAX_NUM_PROCESSES", "2")
    reached = []

    def answer(where, timeout):
        reached.append(where)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", answer)
    distributed.start(process_id=1)
    common = dict(cluster_detection_method="deactivate")
    assert started == [
        dict(
            **dict(coordinator_address="node0:65535", num_processes=4, process_id=0, **common),
            **dict(initialization_timeout=9, heartbeat_timeout_seconds=7),
        ),
        dict(
            **dict(coordinator_address="[::1]:1", num_processes=2, process_id=1, **common),
            **dict(initialization_timeout=300, heartbeat_timeout_seconds=100),
        ),
    ]
    assert reached == [("::1", 1)]
    service = dict(jax_enable_preemption_service=False)
    assert started.options == service | dict(jax_cpu_collectives_implementation="gloo")
    gone = (75, ending.lost_message("see the lines above for which"))
    expected_aborts = [(2, NO_CONNECTION.format(9)), gone, (2, NO_CONNECTION.format(300)), gone]
    assert started.aborts == expected_aborts

    started.error = RuntimeError("DEADLINE_EXCEEDED\nand pages")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    started.options.clear()
    message = r"could not be connected \(\{.*'coordinator_address': .*\}\): DEADLINE_EXCEEDED$"
    with pytest.raises(UserError, match=message):
        distributed.start(process_id=1)
    assert started.options == service and started.aborts == [*expected_aborts, expected_aborts[2]]
    monkeypatch.setenv("KVJAX_NUM_PROCESSES", "four")
    with pytest.raises(UserError, match="KVJAX_NUM_PROCESSES=four: must be a whole number"):
        distributed.start(process_id=0)


def test_bad_flags(started):
    host = "must be process 0's host:port, as node0:8476"
    all_three = "give all three (process 0's host:port, the number of processes, the index of"

    def flags_of(coordinator, count=2, process=0):
        return dict(coordinator=coordinator, num_processes=count, process_id=process)

    for flags, message in (
        (
            dict(coordinator="a:1"),
            f"--coordinator without --num_processes and --process_id: {all_three}",
        ),
        (
            dict(process_id=0),
            f"--process_id without --coordinator and --num_processes: {all_three}",
        ),
        (flags_of("a"), f"--coordinator=a: {host}"),
        (flags_of(":1"), f"--coordinator=:1: {host}"),
        (flags_of("a:b"), f"--coordinator=a:b: {host}"),
        (flags_of("a:0"), f"--coordinator=a:0: {host}"),
        (flags_of("a:65536"), f"--coordinator=a:65536: {host}"),
        (flags_of("a:1", 0), "--num_processes = 0: must be at least 1"),
        (flags_of("a:1", 2, 2), "--process_id = 2: must be at least 0 and at most 1"),
        (flags_of("a:1", 2, -1), "--process_id = -1: must be at least 0 and at most 1"),
    ):
        with pytest.raises(UserError) as error:
            distributed.start(**flags)
        assert message in str(error.value)
    assert not started


def test_a_coordinator_that_does_not_answer(started):
    with socket.socket() as s:  # bound, not listening
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
        flags = dict(coordinator=address, num_processes=2, process_id=1)
        with pytest.raises(UserError, match=f"{address}: no answer within 0.2 s"):
            distributed.start(**flags, connect_seconds=0.2)
    assert not started


def test_slurm(started, monkeypatch):
    """Task i of a host takes GPU i, except with one visible GPU or one task for all GPUs."""
    cases = (
        ("8(x2)", "0,1,2,3,4,5,6,7", None),
        ("8(x2)", "", None),
        ("8(x2)", "3", [0]),
        ("1(x2)", "0,1,2,3", [0, 1, 2, 3]),
        ("1", "0,1", [0, 1]),
        ("1(x2)", "", None),
    )
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for per_host, visible, _ in cases:
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", per_host)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        distributed.start()
    times = dict(initialization_timeout=300, heartbeat_timeout_seconds=100)
    assert started == [
        dict(cluster_detection_method="slurm", local_device_ids=devices, **times)
        for *_, devices in cases
    ]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    distributed.start()
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    distributed.start()
    assert len(started) == len(cases)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    distributed.start()
    assert started[-1] == started[1]


def test_a_tpu_pod_has_more_than_one_worker(started, monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster as tpu

    workers_by_pod = {}
    for pod in (tpu.GkeTpuCluster, tpu.GceTpuCluster):
        monkeypatch.setattr(pod, "is_env_present", classmethod(lambda cls: cls in workers_by_pod))
        monkeypatch.setattr(pod, "get_process_count", classmethod(lambda cls: workers_by_pod[cls]))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    started_in = []
    for name in (tpu.GkeTpuCluster, tpu.GceTpuCluster, None):
        for workers in (1, 2):
            workers_by_pod = {name: workers}
            distributed.start()
            started_in += [(name, workers)] * len(started)
            started.clear()
    assert started_in == [(tpu.GkeTpuCluster, 2), (tpu.GceTpuCluster, 2)]
    workers_by_pod = {tpu.GkeTpuCluster: 2}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    distributed.start()
    assert not started
