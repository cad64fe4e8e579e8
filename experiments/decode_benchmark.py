"""Time of one decode step's attention, by mechanism and context length: absorbed, expanded, MHA.

    python -m experiments.decode_benchmark [--lengths=1024,8192,32768,131072] [--save]

One layer at the LRKV paper's d36, one sequence, one query, random entries; the cache is full.
"Expanding first" is the reference implementation, measured once: whole keys and values of every
head, then attention. Measurements of a length are interleaved, and a time is the median. Beside
it stands what bytes and FLOPs take by themselves, at the rates of reading an array once and of a
matrix product, both measured in the same run. Prints tables, and one JSON line.
"""

import statistics

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

from experiments import machine
from experiments import record
from experiments.d36 import MECHANISMS
from experiments.d36 import abstract_attention
from experiments.d36 import model
from kvjax import runtime


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


def _print(rows: list[dict], per_token: list[dict]) -> None:
    print("| mechanism | tokens | cache MB | ms | GB/s | of MHA's time | expanding first, ms |")
    print("|---" + "|---:" * 6 + "|")
    for r in rows:
        expanded = f"{r['expanding_first'] * 1e3:,.1f}" if "expanding_first" in r else ""
        print(
            f"| {r['mechanism']} | {r['tokens']:,} | {r['cache_bytes'] / 1e6:,.1f} "
            f"| {r['seconds'] * 1e3:,.2f} | {r['cache_bytes'] / r['seconds'] / 1e9:.1f} "
            f"| {r['seconds'] / r['mha_seconds']:.2f} | {expanded} |"
        )
    base = per_token[0]
    print("\nPer cached token, between the two longest caches")
    print("| mechanism | bytes | of MHA | FLOPs | ns | of MHA | ns by bytes | ns by FLOPs |")
    print("|---" + "|---:" * 7 + "|")
    for s in per_token:
        print(
            f"| {s['mechanism']} | {s['cache_bytes']:,.0f} "
            f"| {s['cache_bytes'] / base['cache_bytes']:.0%} | {s['flops']:,.0f} | {s['ns']:,.0f} "
            f"| {s['ns'] / s['mha_ns']:.0%} | {s['by_bytes']:,.0f} | {s['by_flops']:,.0f} |"
        )


def main(argv) -> None:
    del argv
    runtime.start()
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    bandwidth, rate = machine.read_rate(dtype), machine.matmul_rate(dtype)
    rows = []
    for length in _LENGTHS.value:
        rows += measure(int(length), dtype, rounds=_ROUNDS.value, expand=_EXPAND.value)
    print(
        f"\n{jax.devices()[0].device_kind}, {dtype}: reads {bandwidth / 1e9:.1f} GB/s, multiplies "
        f"{rate / 1e9:.0f} GFLOP/s\n"
    )
    per_token = slopes(rows, bandwidth, rate)
    _print(rows, per_token)
    rates = dict(read_gbps=bandwidth / 1e9, matmul_gflops=rate / 1e9)
    record.record("decode_benchmark", rates | dict(rows=rows, slopes=per_token), save=_SAVE.value)


if __name__ == "__main__":
    _LENGTHS = flags.DEFINE_list("lengths", ["1024", "8192", "32768", "131072"], "Cached tokens.")
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds of measurements.")
    _EXPAND = flags.DEFINE_bool("expand", True, "Also time expanding first.")
    _SAVE = flags.DEFINE_bool("save", False, "Write experiments/results/decode_benchmark.json.")
    app.run(main)
