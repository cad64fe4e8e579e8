"""Training speed: tokens/s, and the fraction of the machine's own matrix-multiply rate.

    python -m experiments.train_benchmark [--config=configs/mha_tiny.py ...] [--save]

The rate is that of one square product in the compute dtype, measured in the same process before
and after; FLOPs are those of `costs.training_flops_per_token` (attention over all keys, nothing
for rematerialisation or the optimizer). Prints a table, and one JSON line.
"""

import statistics
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import record
from experiments.machine import matmul_rate
from experiments.parameter_table import CONFIGS
from experiments.parameter_table import load
from kvjax import costs
from kvjax import runtime
from kvjax import sharding
from kvjax.program import Program

_CONFIGS = flags.DEFINE_multi_string(
    "config", [], "Config files to time; default: all tiny configs."
)
_STEPS = flags.DEFINE_integer("steps", 12, "Timed steps.")
_SAVE = flags.DEFINE_bool("save", False, "Write experiments/results/train_benchmark.json.")


def training_speed(experiment, steps: int) -> dict:
    """Tokens/s of whole training steps (optimizer included) on random tokens."""
    model = experiment.model
    compute = experiment.compute.resolve(jax.default_backend(), model.block.num_layers)
    mesh = sharding.make_mesh(experiment.mesh, jax.devices())
    program = Program(experiment, compute, mesh)
    shape = (experiment.train.batch_size, experiment.data.sequence_length + 1)
    rows = np.random.default_rng(0).integers(0, model.vocab_size, shape).astype(np.int32)
    state = program.init(jax.random.key(0))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(program.train_step(state, rows))
    compile_seconds = time.perf_counter() - start
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(program.train_step(state, rows))
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    flops = costs.training_flops_per_token(model, experiment.data.sequence_length)
    return dict(
        config=experiment.name,
        tokens_per_second=experiment.tokens_per_step / median,
        slowest=experiment.tokens_per_step / max(seconds),
        fastest=experiment.tokens_per_step / min(seconds),
        gflops=flops * experiment.tokens_per_step / median / 1e9,
        first_step_seconds=compile_seconds,
    )


def main(argv) -> None:
    del argv
    runtime.start()
    paths = _CONFIGS.value or sorted(map(str, CONFIGS.glob("*_tiny.py")))
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    rate = matmul_rate(dtype)
    rows = [training_speed(load(CONFIGS.parent / path), _STEPS.value) for path in paths]
    rate = (rate + matmul_rate(dtype)) / 2
    print(f"\nmatrix multiply, {dtype}: {rate / 1e9:.0f} GFLOP/s")
    print("| config | tokens/s | range | GFLOP/s | of matrix multiply |\n|---|---:|---:|---:|---:|")
    for row in rows:
        row["of_matmul"] = row["gflops"] * 1e9 / rate
        print(
            f"| {row['config']} | {row['tokens_per_second']:,.0f} "
            f"| {row['slowest']:,.0f} to {row['fastest']:,.0f} | {row['gflops']:.0f} "
            f"| {row['of_matmul']:.0%} |"
        )
    record.record("train_benchmark", dict(matmul_gflops=rate / 1e9, rows=rows), save=_SAVE.value)


if __name__ == "__main__":
    app.run(main)
