"""Times decode attention of one layer by mechanism and context length: absorbed, expanded, MHA.

    python -m experiments.benchmarks.decode_benchmark [--lengths=1024,8192,32768,131072] [--save]

One layer at the LRKV paper's d36, one sequence, one query, a full cache of random entries.
"Expanding first" is the reference implementation, measured once: it computes the keys and values of
every head, then attention. Each mechanism's measurements alternate with MHA's; times are medians.
The tables also have predictions from bytes and from FLOPs, at this machine's rates of reading an
array and of a matrix product, which the same run measures.
"""

import functools
import statistics

import jax
import jax.numpy as jnp

from experiments.benchmarks import machine, runner
from experiments.benchmarks.runner import Option
from experiments.d36 import MECHANISMS, abstract_attention, model
from kvjax.foundation import command_line, lists, progress
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
    """Returns a row per mechanism at one length, timed in turns with MHA.

    Only MHA's cache and one other are in memory at a time: more would not fit.
    """
    mha = Step("MHA", length, dtype)
    machine.seconds(functools.partial(mha.run, "xla"))  # compiles
    rows = []
    for name in MECHANISMS:
        step = mha if name == "MHA" else Step(name, length, dtype)
        machine.seconds(functools.partial(step.run, "xla"))
        seconds, mha_seconds = [], []
        for _ in range(rounds):
            mha_seconds += machine.seconds(functools.partial(mha.run, "xla"))
            seconds += machine.seconds(functools.partial(step.run, "xla"))
        row = dict(mechanism=name, tokens=length, cache_bytes=step.bytes, flops=step.flops)
        row |= dict(seconds=statistics.median(seconds), range=(min(seconds), max(seconds)))
        row |= dict(mha_seconds=statistics.median(mha_seconds))
        if expand:
            expanded = machine.seconds(functools.partial(step.run, "reference"), 2)[1]
            row |= dict(expanding_first=expanded)
        rows.append(row)
        del step
    return rows


def slopes(rows: list[dict], bandwidth: float, rate: float) -> list[dict]:
    """Returns ns per cached token between the two longest caches, measured and predicted."""
    result = []
    for name in MECHANISMS:
        short, long = [r for r in rows if r["mechanism"] == name][-2:]
        tokens = long["tokens"] - short["tokens"]
        keys = ("cache_bytes", "flops", "seconds", "mha_seconds")
        per_token = {key: (long[key] - short[key]) / tokens for key in keys}
        result.append(
            dict(
                mechanism=name,
                cache_bytes=per_token["cache_bytes"],
                flops=per_token["flops"],
                ns=1e9 * per_token["seconds"],
                mha_ns=1e9 * per_token["mha_seconds"],
                by_bytes=1e9 * per_token["cache_bytes"] / bandwidth,
                by_flops=1e9 * per_token["flops"] / rate,
            )
        )
    return result


_TIMES = {
    "mechanism": "{mechanism}",
    "tokens": "{tokens:,}",
    "cache MB": lambda r: f"{r['cache_bytes'] / 1e6:,.1f}",
    "ms": lambda r: f"{r['seconds'] * 1e3:,.2f}",
    "GB/s": lambda r: f"{r['cache_bytes'] / r['seconds'] / 1e9:.1f}",
    "of MHA's time": lambda r: f"{r['seconds'] / r['mha_seconds']:.2f}",
    "expanding first, ms": lambda r: (
        f"{r['expanding_first'] * 1e3:,.1f}" if "expanding_first" in r else ""
    ),
}
_SLOPES = {
    "mechanism": "{mechanism}",
    "bytes": "{cache_bytes:,.0f}",
    "of MHA": "{share:.0%}",
    "FLOPs": "{flops:,.0f}",
    "ns": "{ns:,.0f}",
    "of MHA's ns": lambda s: f"{s['ns'] / s['mha_ns']:.0%}",
    "ns by bytes": "{by_bytes:,.0f}",
    "ns by FLOPs": "{by_flops:,.0f}",
}


def _show(result: dict, out: Output) -> None:
    read, multiply = result["read_gbps"], result["matmul_gflops"]
    kind = f"{jax.devices()[0].device_kind}, {_dtype()}"
    out.say(f"{kind}: reads {read:.1f} GB/s, multiplies {multiply:.0f} GFLOP/s")
    out.table(*runner.table(_TIMES, result["rows"]))
    base = result["slopes"][0]["cache_bytes"]
    rows = [row | dict(share=row["cache_bytes"] / base) for row in result["slopes"]]
    title = "\nPer cached token, between the two longest caches"
    out.show(Table(title, *runner.table(_SLOPES, rows)))


def _dtype() -> jnp.dtype:
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def _lengths(option: str, text: str) -> list[int]:
    lengths = sorted(lists.integers(option, text))
    if len(lengths) < 2 or lengths[-1] > rope.MAX_POSITION:
        raise UserError(
            f"{option}={text}: must be two or more numbers, none above {rope.MAX_POSITION}: the "
            "last table is of the difference between the largest two"
        )
    return lengths


def _measure(options: runner.Options) -> dict:
    dtype, longest = _dtype(), options.lengths[-1]
    _, (_, _, cache) = abstract_attention("MHA", longest, dtype)
    needed = 2 * sum(x.size * x.dtype.itemsize for x in cache.values())  # MHA's and another's
    machine.check_fits(f"--lengths={longest}", f"two caches of {longest:,} tokens", needed)
    rows, how = [], dict(rounds=options.rounds, expand=options.expand)
    with progress.waiting("measuring") as doing:
        doing.at("read and matmul rates of this machine")
        bandwidth, rate = machine.read_rate(dtype), machine.matmul_rate(dtype)
        for length in options.lengths:
            doing.at(f"{length:,} tokens")
            rows += measure(length, dtype, **how)
    rates = dict(read_gbps=bandwidth / 1e9, matmul_gflops=rate / 1e9)
    return rates | dict(rows=rows, slopes=slopes(rows, bandwidth, rate))


main = runner.benchmark(
    "decode_benchmark",
    __doc__,
    dict(
        lengths=Option("1024,8192,32768,131072", "cached tokens, two or more", parse=_lengths),
        rounds=Option(5, "interleaved rounds of measurements", least=1),
        expand=Option(True, "also time expanding first"),
    ),
    _measure,
    _show,
)

if __name__ == "__main__":
    command_line.run(main)
