"""Time of one decode step's attention, by mechanism and context length: absorbed, expanded, MHA.

    python -m experiments.benchmarks.decode_benchmark [--lengths=1024,8192,32768,131072] [--save]

One layer at the LRKV paper's d36, one sequence, one query, random entries; the cache is full.
"Expanding first" is the reference implementation, measured once: whole keys and values of every
head, then attention. Measurements of a length are interleaved, and a time is the median. Beside
it stands what bytes and FLOPs take by themselves, at the rates of reading an array once and of a
matrix product, both measured in the same run. Prints tables.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp

from experiments import record
from experiments.benchmarks import machine
from experiments.d36 import MECHANISMS, abstract_attention, model
from kvjax.foundation import command_line, lists, progress, runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output, Table
from kvjax.layers import rope


class Step:
    """One mechanism's attention over a full cache of `length` random tokens."""

    def __init__(self, name: str, length: int, dtype: jnp.dtype):
        config = model(name, layers=1)
        attend, shapes = abstract_attention(name, length, dtype)
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        arguments = tree.unflatten(
            [draw(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        )
        self.name, self.length = name, length
        self.bytes = sum(array.nbytes for array in arguments[2].values())
        cost = config.mechanisms[0].decode_flops(config.block.angles_base)
        self.flops = cost.per_query + cost.per_key * length
        attend = jax.jit(attend, static_argnames="implementation")
        self.run = lambda name: attend(*arguments, implementation=name)


def measure(length: int, dtype: jnp.dtype, *, rounds: int, expand: bool) -> list[dict]:
    """Rows of one length: seconds per mechanism, each in turns with MHA (no two others at once:
    their caches would not fit)."""
    mha = Step("MHA", length, dtype)
    machine.seconds(lambda: mha.run("xla"))  # compiles
    rows = []
    for name in MECHANISMS:
        step = mha if name == "MHA" else Step(name, length, dtype)
        machine.seconds(lambda step=step: step.run("xla"))
        taken, beside = [], []
        for _ in range(rounds):
            beside += machine.seconds(lambda: mha.run("xla"))
            taken += machine.seconds(lambda step=step: step.run("xla"))
        row = dict(mechanism=name, tokens=length, cache_bytes=step.bytes, flops=step.flops)
        row |= dict(seconds=statistics.median(taken), range=(min(taken), max(taken)))
        row |= dict(mha_seconds=statistics.median(beside))
        if expand:
            run = lambda step=step: step.run("reference")
            row |= dict(expanding_first=machine.seconds(run, 2)[1])
        rows.append(row)
        del step
    return rows


def slopes(rows: list[dict], bandwidth: float, rate: float) -> list[dict]:
    """Nanoseconds per cached token between the two longest caches, measured and predicted."""
    result = []
    for name in MECHANISMS:
        short, long = [r for r in rows if r["mechanism"] == name][-2:]
        tokens = long["tokens"] - short["tokens"]
        per_token = lambda key, a=short, b=long, n=tokens: (b[key] - a[key]) / n
        result.append(
            dict(
                mechanism=name,
                cache_bytes=per_token("cache_bytes"),
                flops=per_token("flops"),
                ns=1e9 * per_token("seconds"),
                mha_ns=1e9 * per_token("mha_seconds"),
                by_bytes=1e9 * per_token("cache_bytes") / bandwidth,
                by_flops=1e9 * per_token("flops") / rate,
            )
        )
    return result


def _show(rows: list[dict], per_token: list[dict], out: Output) -> None:
    header = ("mechanism", "tokens", "cache MB", "ms", "GB/s", "of MHA's time")
    cells = [
        (
            r["mechanism"],
            f"{r['tokens']:,}",
            f"{r['cache_bytes'] / 1e6:,.1f}",
            f"{r['seconds'] * 1e3:,.2f}",
            f"{r['cache_bytes'] / r['seconds'] / 1e9:.1f}",
            f"{r['seconds'] / r['mha_seconds']:.2f}",
            f"{r['expanding_first'] * 1e3:,.1f}" if "expanding_first" in r else "",
        )
        for r in rows
    ]
    out.table((*header, "expanding first, ms"), cells)
    base = per_token[0]
    header = ("mechanism", "bytes", "of MHA", "FLOPs", "ns", "of MHA", "ns by bytes", "ns by FLOPs")
    cells = [
        (
            s["mechanism"],
            f"{s['cache_bytes']:,.0f}",
            f"{s['cache_bytes'] / base['cache_bytes']:.0%}",
            f"{s['flops']:,.0f}",
            f"{s['ns']:,.0f}",
            f"{s['ns'] / s['mha_ns']:.0%}",
            f"{s['by_bytes']:,.0f}",
            f"{s['by_flops']:,.0f}",
        )
        for s in per_token
    ]
    out.show(Table("\nPer cached token, between the two longest caches", header, cells))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    usual = "1024,8192,32768,131072"
    add("--lengths", default=usual, help=f"cached tokens, two numbers or more ({usual})")
    add("--rounds", type=int, default=5, help="interleaved rounds of measurements (5)")
    expand = dict(action=argparse.BooleanOptionalAction, default=True)
    add("--expand", **expand, help="also time expanding first (yes)")
    add("--save", action="store_true", help="write experiments/results/decode_benchmark.json")
    parser.add_output()
    options = parser.parse(arguments)
    lengths = sorted(set(lists.integers("--lengths", options.lengths)))
    if len(lengths) < 2 or lengths[-1] > rope.MAX_POSITION:
        raise UserError(
            f"--lengths={options.lengths}: must be two or more numbers, none above "
            f"{rope.MAX_POSITION}: the last table is of the difference between the largest two"
        )
    options.lengths = lengths
    at_least("--rounds", options.rounds, 1)
    record.check(options.save)
    return options


def _check_memory(length: int, dtype: jnp.dtype) -> None:
    """Raises a UserError unless MHA's cache and another's as large have room."""
    _, (_, _, cache) = abstract_attention("MHA", length, dtype)
    need = 2 * sum(x.size * x.dtype.itemsize for x in cache.values())
    there = runtime.memory_per_device()
    if need > there:
        raise UserError(
            f"--lengths={length}: two caches of so many tokens need {need / 1e9:,.1f} GB of "
            f"{there / 1e9:,.1f} GB: give shorter ones"
        )


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    options = _options(arguments)
    runtime.start()
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    _check_memory(options.lengths[-1], dtype)
    rows, how = [], dict(rounds=options.rounds, expand=options.expand)
    with progress.waiting("measuring") as doing:
        doing.at("what this machine reads and multiplies")
        bandwidth, rate = machine.read_rate(dtype), machine.matmul_rate(dtype)
        for length in options.lengths:
            doing.at(f"{length:,} tokens")
            rows += measure(length, dtype, **how)
    out = Output(options)
    out.say(
        f"{jax.devices()[0].device_kind}, {dtype}: reads {bandwidth / 1e9:.1f} GB/s, multiplies "
        f"{rate / 1e9:.0f} GFLOP/s"
    )
    per_token = slopes(rows, bandwidth, rate)
    _show(rows, per_token, out)
    rates = dict(read_gbps=bandwidth / 1e9, matmul_gflops=rate / 1e9)
    result = rates | dict(rows=rows, slopes=per_token)
    record.record("decode_benchmark", result, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
