"""Measures training and decode speed of the mechanisms of `small_caches`, on an idle machine.

    python -m experiments.studies.small_caches_speed [--mechanisms=mha,lrkv] [--save]

The same configs with the same parameters. Training: median time of whole steps of 32 x 256 tokens,
Muon included. Decoding: 8 sequences, 64 tokens after prompts of 64, from the cache, median of
three. Weights are random, which does not affect time. The FLOP/s of matrix products, measured
before and after each mechanism, reveal other load on the machine. `small_caches` shows these
figures in its table. Takes about 20 s per mechanism.
"""

from collections.abc import Mapping, Sequence
import statistics

import jax

from experiments import record
from experiments.benchmarks import generate_benchmark, jax_training
from experiments.studies import small_caches
from experiments.studies.grid import Run
from experiments.studies.options import Parser
from kvjax.decoding.generator import Generator
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.output import Output
from kvjax.model.transformer import Transformer

_DECODE = dict(prompt=64, new=64, repeats=3)
_SEQUENCES = 8


def measured(run: Run, steps: int) -> dict:
    """Returns tokens/s of training and decoding, and FLOP/s of matrix products before and after."""
    keys = [f"{key}={value}" for key, value in run.overrides.items()]
    training = jax_training.training_speed(str(run.cell.config), keys, steps)
    tokens = run.experiment.tokens_per_step
    rates = [tokens / seconds for seconds in training["seconds"]]
    row = dict(
        mechanism=run.cell.name,
        training_tokens_per_second=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        decode_tokens_per_second=decoding(run),
        matmul_gflops=[rate / 1e9 for rate in training["matmul_flops"]],
    )
    jax.clear_caches()
    return row


def decoding(run: Run) -> float:
    """Returns tokens/s over all sequences, with random weights."""
    model = run.experiment.model
    compute = run.experiment.compute.resolve(jax.default_backend(), model.block.num_layers)
    generator = Generator(Transformer(model, jax.random.key(0)), compute)
    measured = generate_benchmark.measure(generator, _SEQUENCES, **_DECODE)
    return measured["decode_tokens_per_second"]


_HEADER = ("config", "training tokens/s", "range", "decoding tokens/s", "matrix products, GFLOP/s")


def _cells(r: Mapping) -> tuple:
    ends = f"{r['slowest']:,.0f} to {r['fastest']:,.0f}"
    rates = " and ".join(f"{rate:,.0f}" for rate in r["matmul_gflops"])
    speeds = (r["training_tokens_per_second"], ends, r["decode_tokens_per_second"])
    shown = (x if isinstance(x, str) else f"{x:,.0f}" for x in speeds)
    return r["mechanism"], *shown, rates


def main(arguments: Sequence[str]) -> None:
    """Measures the mechanisms and prints the table."""
    parser = Parser(__doc__, small_caches.SPEED, seeds=0, trains=False)
    parser.names("mechanisms", small_caches.EVERY)
    parser.count("steps", 8, "timed training steps (8)")
    options = parser.parse(arguments)
    runtime.start()
    rows, out = [], Output(options)
    runs = small_caches.runs_of(options.mechanisms, 1, small_caches.STEPS)
    with progress.waiting("timing") as doing:
        for number, run in enumerate(runs, 1):
            doing.at(f"{run.cell.name}, {number} of {len(runs)}")
            rows.append(measured(run, options.steps))
    out.table(_HEADER, map(_cells, rows))
    record.record(small_caches.SPEED, dict(rows=rows), out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
