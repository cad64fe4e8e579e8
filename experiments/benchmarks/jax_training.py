"""Times training steps of a config, in a child process of `train_benchmark`."""

import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import contender
from experiments.benchmarks.machine import matmul_rate
from kvjax import config as config_lib
from kvjax.distributed import sharding
from kvjax.foundation import runtime
from kvjax.foundation.command_line import load_config
from kvjax.training.program import Program

WARMUP = 3


def load(path: str, overrides: list[str]) -> config_lib.Experiment:
    """Returns the experiment of a config file with overridden keys.

    Args:
      overrides: keys and values, as "train.batch_size=32".

    Raises:
      UserError: see `load_config` and `resolve`.
    """
    overrides = [f"--config.{override}" for override in overrides]
    return config_lib.resolve(load_config(pathlib.Path(path), overrides))


def training_speed(path: str, overrides: list[str], steps: int) -> dict:
    """Times whole training steps on one batch of random tokens.

    Returns:
      A dict for JSON:
      - seconds: list, one for each of `steps` steps
      - first_step_seconds: seconds of the first step, including compilation
      - loss: loss of the last step
      - peak_bytes: peak memory of a device; None on CPU
      - matmul_flops: FLOP/s of a matrix product in the compute dtype, measured before the steps and
        again after them
      - platform: "cuda", "tpu" or "cpu"
      - count: number of devices
    """
    runtime.start()
    experiment = load(path, overrides)
    model = experiment.model
    compute = experiment.compute.resolve(jax.default_backend(), model.block.num_layers)
    rates = [matmul_rate(compute.dtype)]
    program = Program(experiment, compute, sharding.make_mesh(experiment.mesh, jax.devices()))
    shape = (experiment.train.batch_size, experiment.data.sequence_length + 1)
    rows = np.random.default_rng(0).integers(0, model.vocab_size, shape).astype(np.int32)
    state = program.init(jax.random.key(0))

    def dispatch() -> dict[str, jax.Array]:
        nonlocal state
        state, metrics = program.train_step(state, rows)
        return metrics

    start = time.perf_counter()
    jax.block_until_ready(dispatch())
    first = time.perf_counter() - start
    seconds = contender.step_seconds(dispatch, jax.block_until_ready, steps=steps, warmup=WARMUP)
    loss = jnp.asarray(dispatch()["loss"]).item()
    stats = jax.local_devices()[0].memory_stats() or {}
    del state
    rates.append(matmul_rate(compute.dtype))
    return dict(
        seconds=seconds,
        first_step_seconds=first,
        loss=loss,
        peak_bytes=stats.get("peak_bytes_in_use"),
        matmul_flops=rates,
        platform="cuda" if jax.default_backend() == "gpu" else jax.default_backend(),
        count=jax.device_count(),
    )
