"""Measures seconds per call on the device present, without dispatch.

A call's time is the slope between a short and a long chain of calls in one program: a loop in which
every call's query depends on the previous output, so that no call is hoisted, merged or overlapped.
Calls cycle through a ring of caches that together exceed the on-chip memory. Contenders are sampled
in turns, round by round, so that clock drifts and other processes' load affect all of them.

A GPU still launches every kernel of a call: below about 20 us per call, launches may dominate.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
import statistics
import time

import jax
import jax.numpy as jnp

from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs

Cache = Mapping[str, jax.Array]
Call = Callable[[DecodeInputs, Cache, jax.Array], jax.Array]
Sample = Callable[[], float]  # takes one measurement: seconds per call

# On-chip memory in which a cache may stay between calls: a GPU's L2 (from datasheet and CUDA); a
# TPU's VMEM (jax._src.tpu_info), on v4 also CMEM; a CPU's L3, as laptops have it.
_MIB = 2**20
ON_CHIP_BYTES = {
    "h100": 50 * _MIB,
    "h200": 60 * _MIB,
    "v4": 160 * _MIB,
    "v5e": 128 * _MIB,
    "v5p": 128 * _MIB,
    "v6e": 128 * _MIB,
    "cpu": 16 * _MIB,
}
MAX_RING = 32  # caches
RING = 8  # ratio of ring bytes to on-chip bytes; an L2 does not evict the oldest line first
LAUNCHES = 20e-6  # seconds of a call that launching its kernels on a GPU may take
_ROUND = 5e-3  # seconds of a round; at its end the host checks the loop, which takes about 15 us
_COPY_BYTES, _COPIES = 2**29, 4  # bytes of a copy, copies per round
_CPU_COPY_BYTES = 2**26  # a CPU takes longer, and its cache is smaller


def ring(cache_bytes: int, on_chip_bytes: float) -> int:
    """Returns the number of caches in a ring that is too large to stay on the chip.

    It is at most `MAX_RING`, so rings of small caches may partly stay there.
    """
    return min(MAX_RING, math.ceil(RING * on_chip_bytes / cache_bytes))


def passes(ring_bytes: int, copies: int, bandwidth: float) -> int:
    """Returns how many passes through the ring take `_ROUND` seconds, at `bandwidth` bytes/s."""
    seconds = max(ring_bytes / max(bandwidth, 1.0), copies * LAUNCHES)
    return math.ceil(_ROUND / seconds)


def chain(call: Call, passes: int) -> Callable:
    """Returns a jitted function (rounds, inputs, caches, first_B) -> inputs.

    A round makes `passes` calls on each cache. The number of rounds is a traced argument, so that
    one program runs long and short chains.
    """

    call = jax.jit(call)  # traced once, not once per cache

    def run(
        rounds: int, inputs: DecodeInputs, caches: Sequence[Cache], first_B: jax.Array
    ) -> DecodeInputs:
        def run_pass(_, inputs):
            for cache in caches:
                inputs = _depend_on(inputs, call(inputs, cache, first_B))
            return inputs

        def run_round(_, inputs):
            return jax.lax.fori_loop(0, passes, run_pass, inputs)

        return jax.lax.fori_loop(0, rounds, run_round, inputs)

    return jax.jit(run)


def _depend_on(inputs: DecodeInputs, output: jax.Array) -> DecodeInputs:
    """Makes the queries depend on the output without changing their values."""
    output = jax.lax.optimization_barrier(output)  # all of it is computed, not one element
    tiny = output.ravel()[0].astype(jnp.float32) * 1e-30
    names = [f.name for f in dataclasses.fields(inputs) if f.name.endswith("query")]
    queries = {name: query for name in names if (query := getattr(inputs, name)) is not None}
    queries = {name: query + tiny.astype(query.dtype) for name, query in queries.items()}
    return dataclasses.replace(inputs, **queries)


def seconds(run: Callable[[], object]) -> float:
    """Returns the wall-clock seconds of a call, until its result is ready."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def slope(
    make: Callable[[int], Callable[[], object]],
    calls: int,
    *,
    target: float,
    seconds: Callable[[Callable], float] = seconds,
) -> Sample:
    """Returns a sample of seconds per call, from a run of one round and a longer run.

    Both run once here, so that a sample compiles nothing.

    Args:
      make: returns a function that runs a given number of rounds.
      calls: calls per round.
      target: intended difference of the two runs' durations, in seconds.
      seconds: measures a run.
    """
    short = make(1)
    seconds(short)  # compiles, or loads the compiled program
    round_seconds = min(seconds(short), seconds(short))
    extra_rounds = min(4096, max(1, math.ceil(target / max(round_seconds, 1e-9))))
    long = make(1 + extra_rounds)
    seconds(long)
    return lambda: (seconds(long) - seconds(short)) / (extra_rounds * calls)


def copy(*, target: float, num_bytes: int | None = None) -> tuple[Sample, int]:
    """Returns a sample of the seconds of a copy, and the bytes that it reads and writes."""
    on_cpu = jax.default_backend() == "cpu"
    num_bytes = num_bytes or (_CPU_COPY_BYTES if on_cpu else _COPY_BYTES)
    array = jnp.zeros(num_bytes // 4, jnp.int32)

    def make(rounds):
        times = rounds * _COPIES
        run = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x + 1, x))
        return lambda: run(array)

    return slope(make, _COPIES, target=target), 2 * array.nbytes


def interleaved(samples: Mapping[str, Sample], rounds: int) -> dict[str, list[float]]:
    """Returns each sample's measurements, made in turns; each round starts with another sample."""
    names = list(samples)
    seconds = {name: [] for name in names}
    for i in range(rounds):
        first = i % max(len(names), 1)
        for name in names[first:] + names[:first]:
            seconds[name].append(samples[name]())
    return seconds


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and extremes of seconds per call."""

    median: float
    low: float
    high: float


def spread(seconds: Sequence[float]) -> Spread:
    return Spread(statistics.median(seconds), min(seconds), max(seconds))


def memory_bytes() -> int:
    """Returns the memory of the first device; on CPU the machine's available memory."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        try:  # kernels are profiled with JAX alone too
            import psutil
        except ImportError:  # free memory, without what the page cache would give back
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return psutil.virtual_memory().available
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise UserError(f"{device.device_kind} does not report its memory")
    return int(stats["bytes_limit"])
