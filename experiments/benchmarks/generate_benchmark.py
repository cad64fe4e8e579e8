"""Measures generation of a trained run: time to first token, prefill, decoding, cache.

    python -m experiments.benchmarks.generate_benchmark --workdir=runs/lrkv_tiny [--save]

For each batch size, one generation warms up, --repeats generations are measured at different
temperatures, and a last generation uses top-k and top-p. Only the first should compile; later
compilations are counted. Figures are medians over the repeats. Time to first token is measured from
the call until the first token of every sequence is on the host; it includes checks and the cache's
allocation. Prefill tokens/s are the prompts' tokens divided by this time; decode tokens/s count all
tokens after the first. Prints a table.
"""

import statistics

from etils import epath
import jax
import numpy as np

from experiments.benchmarks import machine, runner
from experiments.benchmarks.runner import Option
from kvjax import cache
from kvjax.config import DTYPES
from kvjax.costs import formulas
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import command_line, progress
from kvjax.workdir.trained import load

_compilations = 0


def _count_compilation(event: str, seconds: float, **_) -> None:
    global _compilations
    _compilations += "backend_compile" in event


def measure(generator: Generator, batch: int, *, prompt: int, new: int, repeats: int) -> dict:
    """Returns the figures of one batch size."""
    rng = np.random.default_rng(0)
    samplings = [Sampling(temperature=0.5 + 0.1 * i) for i in range(repeats + 1)]
    samplings.append(Sampling(top_k=50, top_p=0.9))
    timings, warm_up_compilations = [], None
    for seed, sampling in enumerate(samplings):
        prompts = rng.integers(0, generator.config.vocab_size, (batch, prompt)).tolist()
        generation = generator.start(prompts, num_tokens=new, sampling=sampling, seed=seed)
        for _ in generation:
            pass
        timings.append(generation.timing)
        if warm_up_compilations is None:
            warm_up_compilations = _compilations
    timings = timings[1:-1]
    first_token = statistics.median(t.first for t in timings)
    return {
        "batch": batch,
        "time_to_first_token_ms": 1e3 * first_token,
        "prefill_tokens_per_second": batch * prompt / first_token,
        "decode_tokens_per_second": statistics.median(t.decode_tokens_per_second for t in timings),
        "cache_bytes": cache.live_bytes(generation.cache),
        "capacity": generation.cache.capacity,
        "compilations_after_warm_up": _compilations - warm_up_compilations,
    }


def _measure(options: runner.Options) -> dict:
    workdir = epath.Path(options.workdir)
    loaded = load(workdir, dtype=options.dtype)
    generator = Generator(loaded.model, loaded.compute)
    batch, tokens = max(options.batch), options.prompt_tokens + options.num_tokens
    token_bytes = formulas.cache_bytes_per_token(generator.config, generator.compute.dtype)
    what = f"a cache of {batch:,} sequences of {tokens:,} tokens"
    machine.check_fits(f"--batch={batch}", what, batch * tokens * token_bytes)
    jax.monitoring.register_event_duration_secs_listener(_count_compilation)
    sizes = dict(prompt=options.prompt_tokens, new=options.num_tokens, repeats=options.repeats)
    rows = []
    with progress.waiting("generating") as doing:
        for batch in options.batch:
            doing.at(f"batch {batch}")
            rows.append(measure(generator, batch, **sizes))
    about = dict(workdir=workdir.name, dtype=str(loaded.compute.dtype))
    about |= dict(prompt_tokens=options.prompt_tokens, num_tokens=options.num_tokens)
    return about | dict(rows=rows)


_COLUMNS = {
    "batch": "{batch}",
    "first token": "{time_to_first_token_ms:,.1f} ms",
    "prefill": "{prefill_tokens_per_second:,.0f} /s",
    "decode": "{decode_tokens_per_second:,.0f} /s",
    "cache": lambda row: f"{row['cache_bytes'] / 1e6:,.2f} MB",
    "per token": lambda row: f"{row['cache_bytes'] / row['batch'] / row['capacity']:,.0f} B",
    "compilations": "{compilations_after_warm_up}",
}
main = runner.benchmark(
    "generate_benchmark",
    __doc__,
    dict(
        workdir=Option("runs/lrkv_tiny", "workdir of a trained run"),
        batch=Option([1, 8, 32], "sequences decoded together; may be repeated", least=1),
        prompt_tokens=Option(64, "tokens of each prompt", least=1),
        num_tokens=Option(128, "tokens generated after each, at least 2", least=2),
        repeats=Option(5, "timed generations per batch", least=1),
        dtype=Option("", "dtype to compute in (the run's)", known=DTYPES),
    ),
    _measure,
    lambda result, out: out.table(*runner.table(_COLUMNS, result["rows"])),
)

if __name__ == "__main__":
    command_line.run(main)
