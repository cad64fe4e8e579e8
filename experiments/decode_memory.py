"""Bytes of a decode step as the compiler lays it out: logical, physical, temporary.

    python -m experiments.decode_memory [--topology=v5e:2x2] [--batches=1,8] [--save]

Four layers at the LRKV paper's d36, bfloat16, compiled ahead of time for one chip of a TPU that
need not be there (`pip install -e '.[aot]'`). Physical bytes are those of the cache as an argument,
its padding to tiles included. Temporary memory is compared between caches of 1K and 32K tokens: it
must not grow with the cache, and the whole cache must be aliased, that is updated in place. Below,
the same for one layer's attention alone on the CPU, float32. Prints tables, and one JSON line.
"""

import re

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

from experiments import record
from experiments.d36 import MECHANISMS
from experiments.d36 import abstract_attention
from experiments.d36 import model
from kvjax import cache as cache_lib
from kvjax import costs
from kvjax import runtime
from kvjax import topology
from kvjax.model.config import TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer

LENGTHS = (1024, 32_768)
_KERNEL = 'custom_call_target="(tpu_custom_call|mosaic_gpu)'
BF16 = jnp.dtype(jnp.bfloat16)


def step_memory(
    config: TransformerConfig,
    *,
    batch: int,
    length: int,
    device: jax.Device,
    implementation: str | None = None,
) -> dict:
    """Bytes of the step (one token per sequence -> logits and cache, the cache donated)."""
    make = lambda: Decoder(Transformer(config, jax.random.key(0)), Compute(dtype=BF16))
    graph, state = nnx.split(nnx.eval_shape(make))
    cache = cache_lib.abstract(config.mechanisms, batch=batch, capacity=length, dtype=BF16)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

    def step(weights, tokens, cache, counts):
        decoder = nnx.merge(graph, weights)
        x_BTD, cache = decoder(tokens, cache, counts, implementation=implementation)
        return decoder.logits(x_BTD), cache

    arguments = (nnx.to_pure_dict(state), integers(batch, 1), cache, integers(batch))
    compiled = topology.compile_for(device, jax.jit(step, donate_argnums=2), *arguments)
    touch = jax.jit(lambda cache: jax.tree.map(lambda x: x + 1, cache), donate_argnums=0)
    alone = topology.compile_for(device, touch, cache).memory_analysis()
    memory = compiled.memory_analysis()
    return dict(
        batch=batch,
        length=length,
        costs=batch * length * costs.cache_bytes_per_token(config, BF16),
        logical=cache_lib.live_bytes(cache),
        physical=alone.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        kernel_calls=len(re.findall(_KERNEL, compiled.as_text())),
    )


def attention_memory(name: str, length: int) -> dict:
    """Bytes of one layer's attention on the CPU, one sequence, one query."""
    function, arguments = abstract_attention(name, length, jnp.dtype(jnp.float32))
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    cache = sum(x.size * x.dtype.itemsize for x in arguments[2].values())
    return dict(length=length, logical=cache, temporary=memory.temp_size_in_bytes)


def growth(short: dict, long: dict) -> float:
    """Temporary memory's growth as a part of the cache's."""
    return (long["temporary"] - short["temporary"]) / (long["logical"] - short["logical"])


def main(argv) -> None:
    del argv
    runtime.start(compilation_cache=False)  # a TPU's programs cannot be read back here
    device = topology.tpu_devices(_TOPOLOGY.value)[0]
    rows, cpu = [], []
    print(f"\n4 layers of d36 on {_TOPOLOGY.value}, bfloat16")
    print(
        "| mechanism | batch | tokens | bytes per token and layer | logical MB | by costs |"
        " physical / logical | aliased / physical | temporary MB | its growth / the cache's |\n|---"
        + "|---:" * 9
        + "|"
    )
    for name in _MECHANISMS.value or MECHANISMS:
        for batch in map(int, _BATCHES.value):
            pair = [
                step_memory(model(name, layers=4), batch=batch, length=length, device=device)
                for length in LENGTHS
            ]
            for r in pair:
                r |= dict(mechanism=name, growth=growth(*pair))
                rows.append(r)
                print(
                    f"| {name} | {batch} | {r['length']:,} "
                    f"| {r['logical'] / batch / r['length'] / 4:,.0f} | {r['logical'] / 1e6:,.1f} "
                    f"| {'equal' if r['logical'] == r['costs'] else r['costs']} "
                    f"| {r['physical'] / r['logical']:.4f} | {r['aliased'] / r['physical']:.4f} "
                    f"| {r['temporary'] / 1e6:.1f} | {r['growth']:.2%} |",
                    flush=True,
                )
    print("\nAttention of one layer on the CPU, float32, one sequence")
    print("| mechanism | temporary MB at 1K | at 32K | cache MB at 32K | growth / the cache's |")
    print("|---" + "|---:" * 4 + "|")
    for name in _MECHANISMS.value or MECHANISMS:
        short, long = (attention_memory(name, length) for length in LENGTHS)
        cpu.append(dict(mechanism=name, short=short, long=long, growth=growth(short, long)))
        print(
            f"| {name} | {short['temporary'] / 1e6:.2f} | {long['temporary'] / 1e6:.2f} "
            f"| {long['logical'] / 1e6:.1f} | {growth(short, long):.2%} |"
        )
    result = dict(topology=_TOPOLOGY.value, decode_step=rows, attention_on_cpu=cpu)
    record.record("decode_memory", result, save=_SAVE.value)


if __name__ == "__main__":
    _TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "A TPU topology; one chip is used.")
    _BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Sequences decoded together.")
    _MECHANISMS = flags.DEFINE_list("mechanisms", [], "Names of experiments/d36.py; empty: all.")
    _SAVE = flags.DEFINE_bool("save", False, "Write experiments/results/decode_memory.json.")
    app.run(main)
