"""Time of a whole decode step at the LRKV paper's d36: 2.5B parameters, long caches.

    python -m experiments.benchmarks.model_decode_benchmark [--points=1x32768,4x32768] [--save]

All 36 layers and the head, bfloat16, random weights: one token of each sequence in, its most likely
successor out, the cache appended to in place. Caches are full but for the tokens of the run. A
step's time is the slope between a short and a long chain of steps, the median of several; steps are
started one by one from the host, as generation does. What is read at least is weights and cache,
once; beside it stands the rate of a copy. What does not fit the device is left out and said.
Prints a table.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import gc
import re
import statistics
import time

from flax import nnx
import jax
import jax.numpy as jnp

from experiments import record
from experiments.d36 import MECHANISMS, model
from kvjax import cache as cache_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, lists, progress, runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.output import Output
from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention import api
from kvjax.kernels.profile import side_by_side, timing
from kvjax.model.config import TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute, Transformer

NAME = "model_decode_benchmark"
LAYERS = 36
BF16 = jnp.dtype(jnp.bfloat16)
_NAMES = ("MHA", "GQA-6", "LRKV", "LRKV without RoPE", "MLA")
_ROOM = 0.94  # of the device's memory, for weights and cache
_DRAWN = 1024  # tokens of a cache that are drawn, then repeated


class Stepper:
    """A model of random weights, and its decode step."""

    def __init__(self, config: TransformerConfig, implementation: str | None = None):
        self.config, self._implementation = config, implementation
        make = lambda: Decoder(Transformer(config, jax.random.key(0)), Compute(dtype=BF16))
        self._graph, state = nnx.split(nnx.eval_shape(make))
        self._shapes = nnx.to_pure_dict(state)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the input embedding, a table lookup."""
        c = self.config
        embedding = c.vocab_size * c.block.d_model * BF16.itemsize
        return self.all_weight_bytes - (0 if c.block.tied_head else embedding)

    @property
    def all_weight_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._shapes))

    def cache_bytes(self, batch: int, length: int) -> int:
        return batch * length * formulas.cache_bytes_per_token(self.config, BF16)

    def weights(self) -> dict:
        return _drawn(self._shapes, lambda key, x: 0.02 * jax.random.normal(key, x.shape, x.dtype))

    def cache(self, batch: int, capacity: int) -> cache_lib.Cache:
        """Full of random entries; 1/rms of keys between 0.5 and 1.5."""
        shapes = cache_lib.abstract(
            self.config.mechanisms, batch=batch, capacity=capacity, dtype=BF16
        )

        def entries(key, x):
            few = (*x.shape[:-1], min(_DRAWN, x.shape[-1]))
            draw = jax.random.normal if x.dtype == BF16 else _around_1
            times = -(-x.shape[-1] // few[-1])
            return jnp.tile(draw(key, few, x.dtype), times)[..., : x.shape[-1]]

        return cache_lib.Cache(_drawn(shapes.layers, entries), jnp.zeros(batch, jnp.int32))

    def lower(self, batch: int, capacity: int) -> jax.stages.Lowered:
        """(weights, tokens [B], cache) -> (the next tokens [B], cache), the cache donated."""

        def step(weights, token_B, cache):
            decoder = nnx.merge(self._graph, weights)
            x_B1D, cache = decoder(
                token_B[:, None],
                cache,
                jnp.ones_like(token_B),
                implementation=self._implementation,
            )
            logits_BV = decoder.logits(x_B1D)[:, 0]
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), cache

        cache = cache_lib.abstract(
            self.config.mechanisms, batch=batch, capacity=capacity, dtype=BF16
        )
        token_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
        return jax.jit(step, donate_argnums=2).lower(self._shapes, token_B, cache)


def _around_1(key, shape, dtype) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, 0.5, 1.5)


def _drawn(shapes, draw):
    """Arrays of these shapes; one program for each shape."""
    leaves, tree = jax.tree.flatten(shapes)
    programs = {(x.shape, x.dtype): jax.jit(lambda key, x=x: draw(key, x)) for x in leaves}
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(
        tree, [programs[x.shape, x.dtype](key) for x, key in zip(leaves, keys, strict=True)]
    )


def seconds_per_step(
    program: jax.stages.Compiled,
    weights: dict,
    cache: cache_lib.Cache,
    *,
    length: int,
    steps: int,
    rounds: int,
) -> list[float]:
    """Seconds of a step, `rounds` times, from chains of `steps` and of three times as many.

    Args:
      length: tokens that the cache holds before a chain; it has room for the chain's.
    """
    batch = cache.lengths.shape[0]

    def chain(count: int) -> float:
        nonlocal cache
        cache = dataclasses.replace(cache, lengths=jnp.full((batch,), length, jnp.int32))
        token_B = jnp.zeros((batch,), jnp.int32)
        jax.block_until_ready((token_B, cache.lengths))
        start = time.perf_counter()
        for _ in range(count):
            token_B, cache = program(weights, token_B, cache)
        jax.block_until_ready(token_B)
        return time.perf_counter() - start

    chain(2)
    pairs = [(chain(steps), chain(3 * steps)) for _ in range(rounds)]
    return [(long - short) / (2 * steps) for short, long in pairs]


@dataclasses.dataclass(frozen=True)
class Point:
    """A model with so many sequences of so many tokens, and room for the tokens of a chain."""

    stepper: Stepper
    batch: int
    length: int
    steps: int  # of the short chain

    @property
    def capacity(self) -> int:
        return round_up(self.length + 3 * self.steps, cache_lib.cache.LANES)

    @property
    def read(self) -> dict:
        """Minimum bytes that a step reads, of weights and of the cache."""
        cache_bytes = self.stepper.cache_bytes(self.batch, self.length)
        return dict(weight_bytes=self.stepper.weight_bytes, cache_bytes=cache_bytes)

    @property
    def need(self) -> int:
        """Bytes of weights and cache in memory."""
        return self.stepper.all_weight_bytes + self.stepper.cache_bytes(self.batch, self.capacity)

    def fits(self, there: float) -> bool:
        return self.need <= _ROOM * there

    def measure(self, program: Callable[[], jax.stages.Compiled], rounds: int) -> dict:
        """Measures seconds per step and rates; returns the reason if that fails."""
        try:
            taken = seconds_per_step(
                program(),
                self.stepper.weights(),
                self.stepper.cache(self.batch, self.capacity),
                length=self.length,
                steps=self.steps,
                rounds=rounds,
            )
        except Exception as error:  # one that fails does not end the others
            return dict(why=first_line(error))
        median = statistics.median(taken)
        return dict(
            seconds=dataclasses.asdict(timing.spread(taken)),
            tokens_per_second=self.batch / median,
            gbps=sum(self.read.values()) / median / 1e9,
        )


def measured(points: Sequence[Point], there: float, rounds: int) -> Iterator[tuple[Point, dict]]:
    """Each point with what `Point.measure` gives; programs are compiled side by side.

    Args:
      there: bytes of the device.
    """
    lower = {
        i: functools.partial(point.stepper.lower, point.batch, point.capacity)
        for i, point in enumerate(points)
        if point.fits(there)
    }
    programs = side_by_side.compiled(lower)
    for i, point in enumerate(points):
        if i in programs:
            yield point, point.measure(programs[i], rounds)
        else:
            size = f"{point.need / 1e9:,.1f} GB do not fit {there / 1e9:,.1f} GB"
            yield point, dict(why=size)
        gc.collect()


_HEADER = ("mechanism", "sequences", "tokens of each", "ms a step", "from", "to", "tokens/s")
_HEADER += ("GB of cache", "GB/s", "of copy", "MHA's time / its")


def _cells(r: Mapping) -> tuple:
    names = (r["mechanism"], r["batch"], f"{r['length']:,}")
    size = f"{r['cache_bytes'] / 1e9:,.1f}"
    if "why" in r:
        return *names, *["-"] * 4, size, *["-"] * 3
    ms = (f"{1e3 * x:,.2f}" for x in r["seconds"].values())
    speedup = f"{r['speedup']:.2f}" if "speedup" in r else "-"
    rates = (f"{r['gbps']:,.0f}", f"{r['of_copy']:.0%}", speedup)
    return *names, *ms, f"{r['tokens_per_second']:,.0f}", size, *rates


def with_mha(rows: Sequence[dict]) -> list[dict]:
    """Rows with `speedup`, MHA's time over theirs at the same point, where MHA has one."""
    mha = {
        (r["batch"], r["length"]): r["seconds"]["median"]
        for r in rows
        if r["mechanism"] == "MHA" and "seconds" in r
    }
    at = lambda r: mha.get((r["batch"], r["length"]))
    return [
        r | (dict(speedup=at(r) / r["seconds"]["median"]) if "seconds" in r and at(r) else {})
        for r in rows
    ]


def _point(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    numbers = [n for n in (batch, length) if re.fullmatch("[1-9][0-9]{0,6}", n)]
    if len(numbers) != 2:
        raise UserError(f"--points: {text[:40]!r} must be sequences x tokens, as 4x32768")
    return int(batch), int(length)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    text = "a name of experiments/d36.py; may be repeated"
    add("--mechanism", action="append", help=f"{text} ({', '.join(_NAMES)})")
    add("--points", default="1x32768,4x32768", help="sequences x tokens (1x32768,4x32768)")
    add("--layers", type=int, default=LAYERS, help=f"of the model ({LAYERS})")
    add("--steps", type=int, default=16, help="of the short chain (16)")
    add("--rounds", type=int, default=5, help="measurements of each (5)")
    add("--implementation", help=f"of decode attention: one of {', '.join(api.IMPLEMENTATIONS)}")
    add("--save", action="store_true", help=f"write experiments/results/{NAME}.json")
    parser.add_output()
    options = parser.parse(arguments)
    options.mechanism = options.mechanism or list(_NAMES)
    for name in options.mechanism:
        lists.one("--mechanism", name, MECHANISMS)
    if options.implementation is not None:
        lists.one("--implementation", options.implementation, api.IMPLEMENTATIONS)
    options.points = [_point(text) for text in options.points.split(",")]
    for key in ("layers", "steps", "rounds"):
        at_least(f"--{key}", getattr(options, key), 1)
    record.check(options.save)
    return options


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; the exit status: 1 if nothing could be measured."""
    options = _options(arguments)
    runtime.start()
    copy, copy_bytes = timing.copy(target=0.05)
    copied = copy_bytes / timing.spread([copy() for _ in range(5)]).median
    there = timing.memory_bytes()
    kind = jax.devices()[0].device_kind
    about = dict(device=kind, layers=options.layers, copy_gbps=copied / 1e9)
    rows: list[dict] = []
    with progress.waiting("compiling and decoding"):
        for name in options.mechanism:
            stepper = Stepper(model(name, options.layers), options.implementation)
            points = [Point(stepper, *point, options.steps) for point in options.points]
            for point, found in measured(points, there, options.rounds):
                if "gbps" in found:
                    found["of_copy"] = found["gbps"] * 1e9 / copied
                names = dict(mechanism=name, batch=point.batch, length=point.length)
                rows.append(names | point.read | found)
                told = found.get("why") or f"{1e3 * found['seconds']['median']:,.2f} ms a step"
                command_line.say(f"{name}, {point.batch} x {point.length:,}: {told}")
                if options.save:  # what is stopped leaves its rows
                    record.keep(NAME, about | dict(rows=with_mha(rows)), quiet=True)
    rows, out = with_mha(rows), Output(options)
    out.say(f"{options.layers} layers of d36 on {kind}, bfloat16; a copy: {copied / 1e9:,.0f} GB/s")
    out.table(_HEADER, map(_cells, rows))
    for r in rows:
        if "why" in r:
            out.say(f"- {r['mechanism']}, {r['batch']} x {r['length']:,}: {r['why']}")
    record.record(NAME, about | dict(rows=rows), out, save=options.save)
    return 0 if any("seconds" in r for r in rows) else 1


if __name__ == "__main__":
    command_line.run(main)
