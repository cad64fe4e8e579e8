"""Seconds per call on the device present, without the cost of starting a call.

A call's time is the slope between two chains of calls by one program: a loop whose every call
takes its query from the output before, so that none is hoisted, merged or overlapped. Calls go
round a ring of caches that together do not fit what the chip keeps on itself. What is compared is
sampled in turns, round by round, so that a drift of the clock or of the neighbours meets all of it.

A GPU's program still launches every kernel of a call: below some 20 us a call, that may be what is
measured.
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
Sample = Callable[[], float]  # takes a measurement: seconds per call

# Bytes a chip keeps beside its memory: a GPU's L2 (datasheet, and what CUDA reports); a TPU's VMEM
# (jax._src.tpu_info) and v4's CMEM, where XLA may leave a small cache from call to call.
_MIB = 2**20
ON_CHIP_BYTES = dict(
    h100=50 * _MIB,
    h200=60 * _MIB,
    v4=160 * _MIB,
    v5e=128 * _MIB,
    v5p=128 * _MIB,
    v6e=128 * _MIB,
    cpu=32 * _MIB,
)
MAX_RING = 32
RING = 8  # times what the chip keeps on itself: an L2 does not forget the oldest first
LAUNCHES = 20e-6  # seconds of a call that launching its kernels on a GPU may take
_ROUND = 5e-3  # seconds of a round: the host looks at its end, which costs some 15 us of them
_COPY_BYTES, _COPIES = 2**29, 4  # copied, and how often in a round
_CPU_COPY_BYTES = 2**27  # a CPU takes longer, and its cache is smaller


def ring(cache_bytes: int, on_chip_bytes: float) -> int:
    """How many caches calls go round, so that none is still on the chip when its turn comes.

    At most `MAX_RING`, so that of small ones some may be.
    """
    return min(MAX_RING, math.ceil(RING * on_chip_bytes / cache_bytes))


def passes(ring_bytes: int, copies: int, bandwidth: float) -> int:
    """How often a round goes round the ring, to take some milliseconds at that many bytes/s."""
    seconds = max(ring_bytes / max(bandwidth, 1.0), copies * LAUNCHES)
    return math.ceil(_ROUND / seconds)


def chain(call: Call, passes: int) -> Callable:
    """(rounds, inputs, caches, first_B) -> inputs after as many rounds.

    A round calls on each of the caches, `passes` times. How many rounds there are is an argument:
    one program serves long chains and short ones.
    """

    call = jax.jit(call)  # traced once, not once per cache

    def run(
        rounds: int, inputs: DecodeInputs, caches: Sequence[Cache], first_B: jax.Array
    ) -> DecodeInputs:
        def around(_, inputs):
            for cache in caches:
                inputs = _follow(inputs, call(inputs, cache, first_B))
            return inputs

        round_ = lambda _, inputs: jax.lax.fori_loop(0, passes, around, inputs)
        return jax.lax.fori_loop(0, rounds, round_, inputs)

    return jax.jit(run)


def _follow(inputs: DecodeInputs, output: jax.Array) -> DecodeInputs:
    """The inputs with queries that depend on the output, though not in their figures."""
    output = jax.lax.optimization_barrier(output)  # all of it, not what one element needs
    nothing = output.ravel()[0].astype(jnp.float32) * 1e-30
    queries = [f.name for f in dataclasses.fields(inputs) if f.name.endswith("query")]
    moved = {name: query for name in queries if (query := getattr(inputs, name)) is not None}
    moved = {name: query + nothing.astype(query.dtype) for name, query in moved.items()}
    return dataclasses.replace(inputs, **moved)


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of a call, its result waited for."""
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
    """Samples seconds per call from runs of one round and of more; both have run before.

    Args:
      make: a run of that many rounds.
      calls: of one round.
      target: seconds by which the longer run should be longer.
      seconds: the clock.
    """
    short = make(1)
    seconds(short)  # compiles, or loads what was compiled
    round_seconds = min(seconds(short), seconds(short))
    more = min(4096, max(1, math.ceil(target / max(round_seconds, 1e-9))))
    long = make(1 + more)
    seconds(long)
    return lambda: (seconds(long) - seconds(short)) / (more * calls)


def copy(*, target: float, num_bytes: int | None = None) -> tuple[Sample, int]:
    """Samples seconds of reading and writing an array once; and the bytes that this moves."""
    on_cpu = jax.default_backend() == "cpu"
    num_bytes = num_bytes or (_CPU_COPY_BYTES if on_cpu else _COPY_BYTES)
    array = jnp.zeros(num_bytes // 4, jnp.int32)

    def make(rounds):
        times = rounds * _COPIES
        run = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x + 1, x))
        return lambda: run(array)

    return slope(make, _COPIES, target=target), 2 * array.nbytes


def interleaved(samples: Mapping[str, Sample], rounds: int) -> dict[str, list[float]]:
    """Every sample's measurements, taken in turns; each round begins with another."""
    names = list(samples)
    taken = {name: [] for name in names}
    for i in range(rounds):
        first = i % max(len(names), 1)
        for name in names[first:] + names[:first]:
            taken[name].append(samples[name]())
    return taken


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and extremes of seconds per call."""

    median: float
    low: float
    high: float


def spread(taken: Sequence[float]) -> Spread:
    return Spread(statistics.median(taken), min(taken), max(taken))


def memory_bytes() -> int:
    """What the first device can hold; on CPU, what the machine has free."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise UserError(f"{device.device_kind} does not say how much memory it has")
    return int(stats["bytes_limit"])
