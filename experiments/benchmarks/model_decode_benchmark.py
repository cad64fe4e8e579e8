"""Times a whole decode step at the LRKV paper's d36: 2.5B parameters, long caches.

    python -m experiments.benchmarks.model_decode_benchmark [--points=1x32768,4x32768] [--save]

All 36 layers and the head, bfloat16, random weights. A step takes one token of each sequence,
appends it to the cache in place, and returns its most likely successor. Caches are full except for
the tokens of the run. A step's time is the slope between a short and a long chain of steps, the
median of several slopes; the host starts steps one by one, as in generation. GB/s count each byte
of weights and cache once, and are compared with the rate of a copy. Points that do not fit the
device are skipped and listed. Prints a table.
"""

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
from experiments.benchmarks import runner
from experiments.benchmarks.runner import Option
from experiments.d36 import MECHANISMS, model
from kvjax import cache as cache_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress
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
_ROOM = 0.94  # share of the device's memory for weights and cache
_DRAWN = 1024  # random tokens of a cache, which are repeated


class Stepper:
    """A model of random weights, and its decode step."""

    def __init__(self, config: TransformerConfig, implementation: str | None = None):
        self.config, self._implementation = config, implementation

        def make() -> Decoder:
            packed = jax.default_backend() != "cpu"  # as `Generator` does
            model = Transformer(config, jax.random.key(0))
            return Decoder(model, Compute(dtype=BF16), packed=packed)

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
        """Returns a cache full of random entries; 1/rms of keys between 0.5 and 1.5."""
        shapes = cache_lib.abstract(
            self.config.mechanisms, batch=batch, capacity=capacity, dtype=BF16
        )

        def entries(key, x):
            drawn_shape = (*x.shape[:-1], min(_DRAWN, x.shape[-1]))
            draw = jax.random.normal if x.dtype == BF16 else _around_1
            repeats = -(-x.shape[-1] // drawn_shape[-1])
            return jnp.tile(draw(key, drawn_shape, x.dtype), repeats)[..., : x.shape[-1]]

        return cache_lib.Cache(_drawn(shapes.layers, entries), jnp.zeros(batch, jnp.int32))

    def program(self, batch: int, capacity: int) -> side_by_side.Program:
        """Returns (weights, tokens [B], cache) -> (next tokens [B], cache), jitted, and arguments.

        The cache is donated.
        """

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
        return jax.jit(step, donate_argnums=2), (self._shapes, token_B, cache)


def _around_1(key, shape, dtype) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, 0.5, 1.5)


def _drawn(shapes, draw):
    """Draws arrays of these shapes, with one program per shape."""
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
) -> tuple[list[float], list[float]]:
    """Returns `rounds` measurements of a step, and of the host's share of it, in seconds.

    A step's time is the slope between chains of `steps` and of 3 x `steps`. The host's share is the
    time after which the host could start the next step; if it equals the step's time, the host is
    the bottleneck.

    Args:
      length: cached tokens before a chain; the cache has room for the chain's tokens.
    """
    batch = cache.lengths.shape[0]

    def chain(count: int) -> tuple[float, float]:
        nonlocal cache
        cache = dataclasses.replace(cache, lengths=jnp.full((batch,), length, jnp.int32))
        token_B = jnp.zeros((batch,), jnp.int32)
        jax.block_until_ready((token_B, cache.lengths))
        start = time.perf_counter()
        for _ in range(count):
            token_B, cache = program(weights, token_B, cache)
        started = time.perf_counter() - start
        jax.block_until_ready(token_B)
        return time.perf_counter() - start, started

    chain(2)
    pairs = [(chain(steps), chain(3 * steps)) for _ in range(rounds)]
    whole, host = ([(long[i] - short[i]) / (2 * steps) for short, long in pairs] for i in range(2))
    return whole, host


@dataclasses.dataclass(frozen=True)
class Point:
    """A model with `batch` cached sequences of `length` tokens, and room for a chain's tokens."""

    stepper: Stepper
    batch: int
    length: int
    steps: int  # steps of the short chain

    @property
    def capacity(self) -> int:
        return round_up(self.length + 3 * self.steps, cache_lib.cache.LANES)

    @property
    def read(self) -> dict:
        """Minimum bytes that a step reads, of weights and of the cache."""
        cache_bytes = self.stepper.cache_bytes(self.batch, self.length)
        return dict(weight_bytes=self.stepper.weight_bytes, cache_bytes=cache_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and cache in memory."""
        return self.stepper.all_weight_bytes + self.stepper.cache_bytes(self.batch, self.capacity)

    def fits(self, available: float) -> bool:
        return self.memory_bytes <= _ROOM * available

    def measure(self, program: Callable[[], jax.stages.Compiled], rounds: int) -> dict:
        """Measures seconds per step and rates; returns the reason if that fails."""
        try:
            seconds, host_seconds = seconds_per_step(
                program(),
                self.stepper.weights(),
                self.stepper.cache(self.batch, self.capacity),
                length=self.length,
                steps=self.steps,
                rounds=rounds,
            )
        except Exception as error:  # a failed point does not end the benchmark
            return dict(why=first_line(error))
        median = statistics.median(seconds)
        return dict(
            seconds=dataclasses.asdict(timing.spread(seconds)),
            host_seconds=statistics.median(host_seconds),
            tokens_per_second=self.batch / median,
            gbps=sum(self.read.values()) / median / 1e9,
        )


def measured(
    points: Sequence[Point], available: float, rounds: int
) -> Iterator[tuple[Point, dict]]:
    """Yields each point with its `Point.measure`; compiles the programs side by side.

    Args:
      available: the device's bytes.
    """
    lower = {
        i: functools.partial(point.stepper.program, point.batch, point.capacity)
        for i, point in enumerate(points)
        if point.fits(available)
    }
    programs = side_by_side.compiled(lower)
    for i, point in enumerate(points):
        if i in programs:
            yield point, point.measure(programs[i], rounds)
        else:
            size = f"{point.memory_bytes / 1e9:,.1f} GB do not fit {available / 1e9:,.1f} GB"
            yield point, dict(why=size)
        gc.collect()


def with_mha(rows: Sequence[dict]) -> list[dict]:
    """Adds `speedup`, MHA's time over the row's, if MHA was measured at the same point."""
    mha = {
        (r["batch"], r["length"]): r["seconds"]["median"]
        for r in rows
        if r["mechanism"] == "MHA" and "seconds" in r
    }
    with_speedup = []
    for r in rows:
        base = mha.get((r["batch"], r["length"]))
        known = base is not None and "seconds" in r
        with_speedup.append(r | (dict(speedup=base / r["seconds"]["median"]) if known else {}))
    return with_speedup


def _measure(options: runner.Options) -> dict:
    copy, copy_bytes = timing.copy(target=0.05)
    copied = copy_bytes / timing.spread([copy() for _ in range(5)]).median
    available = timing.memory_bytes()
    about = dict(device=jax.devices()[0].device_kind, layers=options.layers)
    about |= dict(copy_gbps=copied / 1e9)
    rows: list[dict] = []
    with progress.waiting("compiling and decoding"):
        for name in options.mechanism:
            stepper = Stepper(model(name, options.layers), options.implementation)
            points = [Point(stepper, *point, options.steps) for point in options.points]
            for point, figures in measured(points, available, options.rounds):
                if "gbps" in figures:
                    figures["of_copy"] = figures["gbps"] * 1e9 / copied
                names = dict(mechanism=name, batch=point.batch, length=point.length)
                rows.append(names | point.read | figures)
                text = figures.get("why") or f"{1e3 * figures['seconds']['median']:,.2f} ms a step"
                command_line.say(f"{name}, {point.batch} x {point.length:,}: {text}")
                if options.save:  # an interrupted run leaves its rows
                    record.keep(NAME, about | dict(rows=with_mha(rows)), quiet=True)
    return about | dict(rows=with_mha(rows))


def _cell(template: str, key: str, scale: float = 1.0) -> Callable[[Mapping], str]:
    """Returns a column that is "-" in rows without the key."""
    return lambda row: template.format(scale * row[key]) if key in row else "-"


def _ms(key: str) -> Callable[[Mapping], str]:
    return lambda row: f"{1e3 * row['seconds'][key]:,.2f}" if "seconds" in row else "-"


COLUMNS = {
    "mechanism": "{mechanism}",
    "sequences": "{batch}",
    "tokens of each": "{length:,}",
    "ms a step": _ms("median"),
    "from": _ms("low"),
    "to": _ms("high"),
    "ms of the host": _cell("{:.2f}", "host_seconds", 1e3),
    "tokens/s": _cell("{:,.0f}", "tokens_per_second"),
    "GB of cache": _cell("{:,.1f}", "cache_bytes", 1e-9),
    "GB/s": _cell("{:,.0f}", "gbps"),
    "of copy": _cell("{:.0%}", "of_copy"),
    "MHA's time / its": _cell("{:.2f}", "speedup"),
}


def _show(result: dict, out: Output) -> None:
    kind, layers, copied = (result[key] for key in ("device", "layers", "copy_gbps"))
    out.say(f"{layers} layers of d36 on {kind}, bfloat16; a copy: {copied:,.0f} GB/s")
    out.table(*runner.table(COLUMNS, result["rows"]))
    for r in result["rows"]:
        if "why" in r:
            out.say(f"- {r['mechanism']}, {r['batch']} x {r['length']:,}: {r['why']}")


def _points(option: str, text: str) -> list[tuple[int, int]]:
    points = []
    for point in text.split(","):
        if not re.fullmatch("[1-9][0-9]{0,6}x[1-9][0-9]{0,6}", point):
            raise UserError(f"{option}: {point[:40]!r} must be sequences x tokens, as 4x32768")
        points.append(tuple(map(int, point.split("x"))))
    return points


main = runner.benchmark(
    NAME,
    __doc__,
    dict(
        mechanism=Option(
            list(_NAMES), "a name of experiments/d36.py; may be repeated", known=MECHANISMS
        ),
        points=Option("1x32768,4x32768", "sequences x tokens", parse=_points),
        layers=Option(LAYERS, "layers of the model", least=1),
        steps=Option(16, "steps of the short chain", least=1),
        rounds=Option(5, "measurements of each point", least=1),
        implementation=Option(None, "of decode attention", known=api.IMPLEMENTATIONS),
    ),
    _measure,
    _show,
    status=lambda result: not any("seconds" in row for row in result["rows"]),
)

if __name__ == "__main__":
    command_line.run(main)
