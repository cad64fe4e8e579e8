"""Connects a process to its job, found by options, environment, Slurm or a TPU pod's metadata."""

import os
import socket
import time
from typing import Any

from kvjax.distributed.ending import abort_message, lost_message
from kvjax.distributed.interruption import TRY_AGAIN
from kvjax.foundation import progress
from kvjax.foundation.configuration import at_least, between
from kvjax.foundation.errors import UserError, first_line


def start(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    connect_seconds: int = 300,
    heartbeat_seconds: int = 100,
) -> None:
    """Connects this process to its job, if there is one; call before the first use of a device.

    Arguments take precedence over the environment's KVJAX_COORDINATOR, KVJAX_NUM_PROCESSES and
    KVJAX_PROCESS_ID, and these over Slurm and a TPU pod's metadata. Does nothing for a single
    process.

    Args:
      coordinator: host:port of process 0, reachable by all others.
      num_processes: number of processes of the job.
      process_id: index of this process, from 0.
      connect_seconds: longest time to wait for the other processes.
      heartbeat_seconds: time without a heartbeat after which a process counts as lost.

    Raises:
      UserError: an incomplete or invalid address, or a coordinator that does not answer.
    """
    options = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    for key, value in options.items():
        options[key] = _from_environment(key) if value is None else value
    missing = [key for key, value in options.items() if value is None]
    if len(missing) == len(options):
        cluster = _cluster()
        if cluster is None:
            return
    elif missing:
        present = [key for key in options if key not in missing]
        raise UserError(
            f"--{' and --'.join(present)} without --{' and --'.join(missing)}: give all three "
            "(process 0's host:port, the number of processes, the index of this one), or none on a "
            "TPU pod and under Slurm"
        )
    else:
        cluster = options | {"cluster_detection_method": "deactivate"}
        _check(**options)
        if options["num_processes"] == 1:
            return
        if options["process_id"]:
            _wait_for_coordinator(options["coordinator"], connect_seconds)
    import jax

    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would install its own handler of SIGTERM; `Interruption` has one.
    jax.config.update("jax_enable_preemption_service", False)
    abort_message.set(
        2,
        lambda: (
            f"not all processes of the job connected within {connect_seconds} s: see which one did "
            "not start, and start all again"
        ),
    )
    if coordinator := cluster.pop("coordinator", None):
        cluster["coordinator_address"] = coordinator
    try:
        with progress.waiting("waiting for the other processes of the job"):
            jax.distributed.initialize(
                **cluster,
                initialization_timeout=connect_seconds,
                heartbeat_timeout_seconds=heartbeat_seconds,
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of the job could not be connected ({cluster}): {first_line(error)}"
        ) from error
    abort_message.set(TRY_AGAIN, lambda: lost_message("see the lines above for which"))


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
    at_least("--num_processes", num_processes, 1)
    between("--process_id", process_id, 0, num_processes - 1)


def _wait_for_coordinator(coordinator: str, seconds: float) -> None:
    """Waits until the coordinator accepts connections; JAX would abort when its time is up."""
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
    """Returns options of `jax.distributed.initialize` for a scheduler; None for one process."""
    env = os.environ
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or "1"
    if "SLURM_STEP_NODELIST" in env and int(tasks) > 1:
        return {"cluster_detection_method": "slurm", "local_device_ids": _slurm_devices(env)}
    if env.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    from jax._src.clusters import cloud_tpu_cluster as tpu  # no public interface has the count

    for cluster in (tpu.GkeTpuCluster, tpu.GceTpuCluster):
        if cluster.is_env_present():
            return {} if cluster.get_process_count() > 1 else None
    return None


def _slurm_devices(env: dict[str, str]) -> list[int] | None:
    """Returns this task's GPUs, or None for JAX's rule: task i of a host uses GPU i.

    The rule is wrong for a single task per host, which should use all GPUs, and for tasks that see
    one GPU each (--gpus-per-task=1).
    """
    visible = [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    per_host = env.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0]
    if len(visible) == 1:
        return [0]
    return list(range(len(visible))) if per_host == "1" and visible else None
