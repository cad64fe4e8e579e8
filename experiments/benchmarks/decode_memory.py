"""Bytes of a decode step as the compiler lays it out: logical, physical, temporary.

    python -m experiments.benchmarks.decode_memory [--topology=v5e:2x2] [--batches=1,8] [--save]
    python -m experiments.benchmarks.decode_memory --mechanism=MHA --mechanism='thin keys, 32'

Four layers at the LRKV paper's d36, bfloat16, compiled ahead of time for one chip of a TPU, which
need not be attached (`pip install -e '.[aot]'`). Physical bytes are the cache's as an argument,
with its padding to tiles. Temporary memory is compared between caches of 1K and 32K tokens: it must
not grow with the cache, and the whole cache must be aliased, that is updated in place. A second
table has the same for one layer's attention on the CPU, float32.
"""

import argparse
import re

from flax import nnx
import jax
import jax.numpy as jnp

from experiments import record
from experiments.d36 import MECHANISMS, abstract_attention, model
from kvjax import cache as cache_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, lists, progress, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output, Table
from kvjax.hardware import datasheets, topology
from kvjax.model.config import TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute, Transformer

LENGTHS = (1024, 32_768)
_KERNEL = 'custom_call_target="(tpu_custom_call|mosaic_gpu)'
LAYERS = 4
BF16 = jnp.dtype(jnp.bfloat16)


def step_memory(
    config: TransformerConfig,
    *,
    batch: int,
    length: int,
    device: jax.Device,
    implementation: str | None = None,
) -> dict:
    """Returns bytes of a step (one token per sequence -> logits and cache, which is donated)."""

    def make() -> Decoder:
        return Decoder(Transformer(config, jax.random.key(0)), Compute(dtype=BF16))

    graph, state = nnx.split(nnx.eval_shape(make))
    cache = cache_lib.abstract(config.mechanisms, batch=batch, capacity=length, dtype=BF16)
    tokens, counts = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch, 1), (batch,)))

    def step(weights, tokens, cache, counts):
        decoder = nnx.merge(graph, weights)
        x_BTD, cache = decoder(tokens, cache, counts, implementation=implementation)
        return decoder.logits(x_BTD), cache

    arguments = (nnx.to_pure_dict(state), tokens, cache, counts)
    compiled = topology.compile_for(device, jax.jit(step, donate_argnums=2), *arguments)
    touch = jax.jit(lambda cache: jax.tree.map(lambda x: x + 1, cache), donate_argnums=0)
    alone = topology.compile_for(device, touch, cache).memory_analysis()
    memory = compiled.memory_analysis()
    return dict(
        batch=batch,
        length=length,
        costs=batch * length * formulas.cache_bytes_per_token(config, BF16),
        logical=cache_lib.live_bytes(cache),
        physical=alone.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        kernel_calls=len(re.findall(_KERNEL, compiled.as_text())),
    )


def attention_memory(name: str, length: int) -> dict:
    """Returns bytes of one layer's attention on the CPU, one sequence, one query."""
    function, arguments = abstract_attention(name, length, jnp.dtype(jnp.float32))
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    cache = sum(x.size * x.dtype.itemsize for x in arguments[2].values())
    return dict(length=length, logical=cache, temporary=memory.temp_size_in_bytes)


def growth(short: dict, long: dict) -> float:
    """Returns temporary memory's growth over the cache's."""
    return (long["temporary"] - short["temporary"]) / (long["logical"] - short["logical"])


def _step_table(rows: list[dict], topology_name: str) -> Table:
    header = ("mechanism", "batch", "tokens", "bytes per token and layer", "logical MB", "by costs")
    header += ("physical / logical", "aliased / physical", "temporary MB")
    cells = [
        (
            r["mechanism"],
            r["batch"],
            f"{r['length']:,}",
            f"{r['logical'] / r['batch'] / r['length'] / LAYERS:,.0f}",
            f"{r['logical'] / 1e6:,.1f}",
            "equal" if r["logical"] == r["costs"] else r["costs"],
            f"{r['physical'] / r['logical']:.4f}",
            f"{r['aliased'] / r['physical']:.4f}",
            f"{r['temporary'] / 1e6:.1f}",
            f"{r['growth']:.2%}",
        )
        for r in rows
    ]
    title = f"{LAYERS} layers of d36 on {topology_name}, bfloat16"
    return Table(title, (*header, "its growth / the cache's"), cells)


def _attention_table(rows: list[dict]) -> Table:
    header = ("mechanism", "temporary MB at 1K", "at 32K", "cache MB at 32K")
    cells = [
        (
            r["mechanism"],
            *(f"{r[key]['temporary'] / 1e6:.2f}" for key in ("short", "long")),
            f"{r['long']['logical'] / 1e6:.1f}",
            f"{r['growth']:.2%}",
        )
        for r in rows
    ]
    title = "\nAttention of one layer on the CPU, float32, one sequence"
    return Table(title, (*header, "growth / the cache's"), cells)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--topology", default="v5e:2x2", help="of TPUs; one chip is used (v5e:2x2)")
    add("--batches", default="1,8", help="sequences decoded together (1,8)")
    text = "a name of experiments/d36.py; may be repeated (all)"
    add("--mechanism", action="append", help=text)
    add("--save", action="store_true", help="write experiments/results/decode_memory.json")
    parser.add_output()
    options = parser.parse(arguments)
    options.batches = lists.integers("--batches", options.batches)
    options.mechanism = options.mechanism or list(MECHANISMS)
    for name in options.mechanism:
        lists.one("--mechanism", name, MECHANISMS)
    record.check(options.save)
    return options


def _check_memory(names: list[str], batch: int, topology_name: str) -> None:
    """Raises a UserError if the largest cache does not fit a chip."""
    there = datasheets.get(topology_name.partition(":")[0]).hbm_bytes
    for name in names:
        each = formulas.cache_bytes_per_token(model(name, LAYERS), BF16)
        need = batch * max(LENGTHS) * each
        if need > there:
            raise UserError(
                f"--batches={batch}: a cache of {name}, so many sequences of {max(LENGTHS):,} "
                f"tokens, has {need / 1e9:,.1f} GB, the chip {there / 1e9:,.1f} GB: give fewer"
            )


def main(arguments: list[str]) -> None:
    """Compiles and prints."""
    options = _options(arguments)
    runtime.start(compilation_cache=False)  # a TPU's programs cannot be read back here
    device = topology.tpu_devices(options.topology)[0]
    names = options.mechanism
    _check_memory(names, max(options.batches), options.topology)
    rows, cpu = [], []
    with progress.waiting("compiling decode steps") as doing:
        for i, name in enumerate(names):
            doing.at(f"{name}, {i + 1} of {len(names)}")
            for batch in options.batches:
                shape = dict(batch=batch, device=device)
                pair = [step_memory(model(name, LAYERS), length=n, **shape) for n in LENGTHS]
                rows += [r | dict(mechanism=name, growth=growth(*pair)) for r in pair]
            short, long = (attention_memory(name, length) for length in LENGTHS)
            cpu.append(dict(mechanism=name, short=short, long=long, growth=growth(short, long)))
    out = Output(options)
    out.show(_step_table(rows, options.topology))
    out.show(_attention_table(cpu))
    result = dict(topology=options.topology, decode_step=rows, attention_on_cpu=cpu)
    record.record("decode_memory", result, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
