"""Generation speed of a trained run: prefill, time to first token, decoding, cache.

    python -m experiments.generate_benchmark --workdir=runs/lrkv_tiny [--save]

Each batch is generated once unmeasured, --repeats times at different temperatures, and once more
with top-k and top-p; nothing may be compiled after the first. Figures are medians over the repeats.
Time to first token is from the call, checks and the cache's allocation included, to the first token
of every sequence on the host; prefill tokens/s are the prompts' tokens over it; decode tokens/s
count all tokens after the first. Prints a table, and one JSON line.
"""

import statistics
import sys

from absl import app
from absl import flags
from etils import epath
import jax
import numpy as np

from experiments import record
from kvjax import cache
from kvjax import runtime
from kvjax.configuration import at_least
from kvjax.decoding import Generator
from kvjax.errors import UserError
from kvjax.sampling import Sampling
from kvjax.trained import load

_WORKDIR = flags.DEFINE_string("workdir", "runs/lrkv_tiny", "A run's folder.")
_BATCHES = flags.DEFINE_multi_integer("batch", [1, 8, 32], "Sequences at once.")
_PROMPT = flags.DEFINE_integer("prompt_tokens", 64, "Tokens of each prompt.")
_NEW = flags.DEFINE_integer("num_tokens", 128, "Tokens generated after each, at least 2.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed generations per batch.")
_DTYPE = flags.DEFINE_string("dtype", "", "To compute in; default: the run's.")
_SAVE = flags.DEFINE_bool("save", False, "Write experiments/results/generate_benchmark.json.")

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


def main(argv: list[str]) -> None:
    del argv
    runtime.start()
    jax.monitoring.register_event_duration_secs_listener(_count)
    try:
        at_least("num_tokens", _NEW.value, 2)
        loaded = load(epath.Path(_WORKDIR.value), dtype=_DTYPE.value)
        generator = Generator(loaded.model, loaded.compute)
        sizes = dict(prompt=_PROMPT.value, new=_NEW.value, repeats=_REPEATS.value)
        rows = [measure(generator, batch, **sizes) for batch in _BATCHES.value]
    except UserError as error:
        print(f"kvjax: {error}", file=sys.stderr)
        sys.exit(2)
    titles = ("batch", "first token", "prefill", "decode", "cache", "per token", "compilations")
    print("".join(f"{title:>14}" for title in titles))
    for row in rows:
        cells = (
            row["batch"],
            f"{row['time_to_first_token_ms']:,.1f} ms",
            f"{row['prefill_tokens_per_second']:,.0f} /s",
            f"{row['decode_tokens_per_second']:,.0f} /s",
            f"{row['cache_bytes'] / 1e6:,.2f} MB",
            f"{row['cache_bytes'] / row['batch'] / row['capacity']:,.0f} B",
            row["compilations_after_warm_up"],
        )
        print("".join(f"{cell:>14}" for cell in cells))
    result = dict(
        workdir=epath.Path(_WORKDIR.value).name,
        dtype=str(loaded.compute.dtype),
        prompt_tokens=_PROMPT.value,
        num_tokens=_NEW.value,
        rows=rows,
    )
    record.record("generate_benchmark", result, save=_SAVE.value)


if __name__ == "__main__":
    app.run(main)
