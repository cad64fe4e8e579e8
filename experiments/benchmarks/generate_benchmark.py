"""Generation speed of a trained run: prefill, time to first token, decoding, cache.

    python -m experiments.benchmarks.generate_benchmark --workdir=runs/lrkv_tiny [--save]

Each batch is generated once unmeasured, --repeats times at different temperatures, and once more
with top-k and top-p; nothing may be compiled after the first. Figures are medians over the repeats.
Time to first token is from the call, checks and the cache's allocation included, to the first token
of every sequence on the host; prefill tokens/s are the prompts' tokens over it; decode tokens/s
count all tokens after the first. Prints a table.
"""

import argparse
import statistics

from etils import epath
import jax
import numpy as np

from experiments import record
from kvjax import cache
from kvjax.config import DTYPES
from kvjax.costs import formulas
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.workdir.trained import load

_compilations = 0


def _count(event: str, seconds: float, **_) -> None:
    global _compilations
    _compilations += "backend_compile" in event


def measure(generator: Generator, batch: int, *, prompt: int, new: int, repeats: int) -> dict:
    """One row of the table."""
    rng = np.random.default_rng(0)
    samplings = [Sampling(temperature=0.5 + 0.1 * i) for i in range(repeats + 1)]
    samplings.append(Sampling(top_k=50, top_p=0.9))
    timings, after_first = [], None
    for seed, sampling in enumerate(samplings):
        prompts = rng.integers(0, generator.config.vocab_size, (batch, prompt)).tolist()
        generation = generator.start(prompts, num_tokens=new, sampling=sampling, seed=seed)
        for _ in generation:
            pass
        timings.append(generation.timing)
        after_first = _compilations if after_first is None else after_first
    timings = timings[1:-1]
    first = statistics.median(t.first for t in timings)
    return {
        "batch": batch,
        "time_to_first_token_ms": 1e3 * first,
        "prefill_tokens_per_second": batch * prompt / first,
        "decode_tokens_per_second": statistics.median(t.decode_tokens_per_second for t in timings),
        "cache_bytes": cache.live_bytes(generation.cache),
        "capacity": generation.cache.capacity,
        "compilations_after_warm_up": _compilations - after_first,
    }


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--workdir", default="runs/lrkv_tiny", help="of a trained run (runs/lrkv_tiny)")
    add("--batch", type=int, action="append", help="sequences at once; may be repeated (1, 8, 32)")
    add("--prompt_tokens", type=int, default=64, help="of each prompt (64)")
    add("--num_tokens", type=int, default=128, help="generated after each, at least 2 (128)")
    add("--repeats", type=int, default=5, help="timed generations per batch (5)")
    add("--dtype", default="", help="to compute in (the run's)")
    add("--save", action="store_true", help="write experiments/results/generate_benchmark.json")
    parser.add_output()
    options = parser.parse(arguments)
    options.batch = options.batch or [1, 8, 32]
    for batch in options.batch:
        at_least("--batch", batch, 1)
    at_least("--prompt_tokens", options.prompt_tokens, 1)
    at_least("--num_tokens", options.num_tokens, 2)
    at_least("--repeats", options.repeats, 1)
    if options.dtype:
        one_of("--dtype", options.dtype, DTYPES)
    record.check(options.save)
    return options


def _check_memory(generator: Generator, batch: int, tokens: int) -> None:
    """Raises a UserError if a cache, or only its prompts, would not fit."""
    each = formulas.cache_bytes_per_token(generator.config, generator.compute.dtype)
    need, there = batch * tokens * each, runtime.memory_per_device()
    if need > there:
        raise UserError(
            f"--batch={batch}: a cache of so many sequences of {tokens:,} tokens needs "
            f"{need / 1e9:,.1f} GB of {there / 1e9:,.1f} GB: give fewer sequences or tokens"
        )


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    options = _options(arguments)
    runtime.start()
    loaded = load(epath.Path(options.workdir), dtype=options.dtype)
    generator = Generator(loaded.model, loaded.compute)
    _check_memory(generator, max(options.batch), options.prompt_tokens + options.num_tokens)
    jax.monitoring.register_event_duration_secs_listener(_count)
    sizes = dict(prompt=options.prompt_tokens, new=options.num_tokens, repeats=options.repeats)
    rows = []
    with progress.waiting("generating") as doing:
        for batch in options.batch:
            doing.at(f"{batch} at once")
            rows.append(measure(generator, batch, **sizes))
    out = Output(options)
    header = ("batch", "first token", "prefill", "decode", "cache", "per token", "compilations")
    cells = [
        (
            row["batch"],
            f"{row['time_to_first_token_ms']:,.1f} ms",
            f"{row['prefill_tokens_per_second']:,.0f} /s",
            f"{row['decode_tokens_per_second']:,.0f} /s",
            f"{row['cache_bytes'] / 1e6:,.2f} MB",
            f"{row['cache_bytes'] / row['batch'] / row['capacity']:,.0f} B",
            row["compilations_after_warm_up"],
        )
        for row in rows
    ]
    out.table(header, cells)
    result = dict(
        workdir=epath.Path(options.workdir).name,
        dtype=str(loaded.compute.dtype),
        prompt_tokens=options.prompt_tokens,
        num_tokens=options.num_tokens,
        rows=rows,
    )
    record.record("generate_benchmark", result, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
