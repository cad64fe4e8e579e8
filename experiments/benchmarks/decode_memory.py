"""Measures the bytes of a compiled decode step: logical, physical, temporary.

    python -m experiments.benchmarks.decode_memory [--topology=v5e:2x2] [--batches=1,8] [--save]
    python -m experiments.benchmarks.decode_memory --mechanism=MHA --mechanism='thin keys, 32'

Four layers at the LRKV paper's d36, bfloat16, compiled ahead of time for one chip of a TPU, which
need not be attached (`pip install -e '.[aot]'`). Physical bytes are those of the cache with padding
to tiles. Temporary memory is compared between caches of 1K and 32K tokens: it must not grow with
the cache, and the whole cache must be aliased, that is updated in place. A second table has the
temporary memory of one layer's attention on the CPU, float32.
"""

import re

from flax import nnx
import jax
import jax.numpy as jnp

from experiments.benchmarks import machine, runner
from experiments.benchmarks.runner import Option
from experiments.d36 import MECHANISMS, abstract_attention, model
from kvjax import cache as cache_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, lists, progress, runtime
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
    cache_bits: int | None = None,
) -> dict:
    """Returns bytes of a step (one token per sequence -> logits and cache, which is donated).

    Args:
      cache_bits: of a quantised cache; None: it is in bfloat16.
    """

    def make() -> Decoder:
        packed = device.platform != "cpu"
        return Decoder(Transformer(config, jax.random.key(0)), Compute(dtype=BF16), packed=packed)

    graph, state = nnx.split(nnx.eval_shape(make))
    cache = cache_lib.abstract(
        config.mechanisms, batch=batch, capacity=length, dtype=BF16, bits=cache_bits
    )
    tokens, counts = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch, 1), (batch,)))

    def step(weights, tokens, cache, counts):
        decoder = nnx.merge(graph, weights)
        x_BTD, cache = decoder(tokens, cache, counts, implementation=implementation)
        return decoder.logits(x_BTD), cache

    arguments = (nnx.to_pure_dict(state), tokens, cache, counts)
    compiled = topology.compile_for(device, jax.jit(step, donate_argnums=2), *arguments)
    touch = jax.jit(lambda cache: jax.tree.map(lambda x: x + 1, cache), donate_argnums=0)
    cache_memory = topology.compile_for(device, touch, cache).memory_analysis()
    memory = compiled.memory_analysis()
    return dict(
        batch=batch,
        length=length,
        costs=batch * length * formulas.cache_bytes_per_token(config, BF16, cache_bits),
        logical=cache_lib.live_bytes(cache),
        physical=cache_memory.argument_size_in_bytes,
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
    """Returns the growth of temporary memory as a share of the cache's."""
    return (long["temporary"] - short["temporary"]) / (long["logical"] - short["logical"])


_STEP = {
    "mechanism": "{mechanism}",
    "batch": "{batch}",
    "tokens": "{length:,}",
    "bytes per token and layer": lambda r: (
        f"{r['logical'] / r['batch'] / r['length'] / LAYERS:,.0f}"
    ),
    "logical MB": lambda r: f"{r['logical'] / 1e6:,.1f}",
    "by costs": lambda r: "equal" if r["logical"] == r["costs"] else r["costs"],
    "physical / logical": lambda r: f"{r['physical'] / r['logical']:.4f}",
    "aliased / physical": lambda r: f"{r['aliased'] / r['physical']:.4f}",
    "temporary MB": lambda r: f"{r['temporary'] / 1e6:.1f}",
    "growth / the cache's": "{growth:.2%}",
}
_ATTENTION = {
    "mechanism": "{mechanism}",
    "temporary MB at 1K": lambda r: f"{r['short']['temporary'] / 1e6:.2f}",
    "at 32K": lambda r: f"{r['long']['temporary'] / 1e6:.2f}",
    "cache MB at 32K": lambda r: f"{r['long']['logical'] / 1e6:.1f}",
    "growth / the cache's": "{growth:.2%}",
}


def _check_memory(options: runner.Options) -> None:
    """Raises a UserError if the largest cache does not fit a chip."""
    available = datasheets.get(options.topology.partition(":")[0]).hbm_bytes
    batch = max(options.batches)
    for name in options.mechanism:
        needed = batch * max(LENGTHS) * formulas.cache_bytes_per_token(model(name, LAYERS), BF16)
        what = f"a cache of {name}, {batch:,} sequences of {max(LENGTHS):,} tokens,"
        machine.check_fits(f"--batches={batch}", what, needed, available)


def _measure(options: runner.Options) -> dict:
    device, names = topology.tpu_devices(options.topology)[0], options.mechanism
    _check_memory(options)
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
    return dict(topology=options.topology, decode_step=rows, attention_on_cpu=cpu)


def _show(result: dict, out: Output) -> None:
    title = f"{LAYERS} layers of d36 on {result['topology']}, bfloat16"
    out.show(Table(title, *runner.table(_STEP, result["decode_step"])))
    title = "\nAttention of one layer on the CPU, float32, one sequence"
    out.show(Table(title, *runner.table(_ATTENTION, result["attention_on_cpu"])))


main = runner.benchmark(
    "decode_memory",
    __doc__,
    dict(
        topology=Option("v5e:2x2", "topology of TPUs; one chip is used"),
        batches=Option("1,8", "sequences decoded together", parse=lists.integers),
        mechanism=Option(
            list(MECHANISMS), "a name of experiments/d36.py; may be repeated", known=MECHANISMS
        ),
    ),
    _measure,
    _show,
    # Without a TPU, programs for it cannot be read back from the compilation cache.
    start=lambda: runtime.start(compilation_cache=False),
)

if __name__ == "__main__":
    command_line.run(main)
