"""Measures what a quantised cache costs a trained model: bits per byte, greedy tokens, step time.

    python -m experiments.benchmarks.quantized --workdir=runs/lrkv_tiny [--workdir=...] [--save]

Held-out text goes through the cache, in float32, int8 and int4, in chunks of 64 tokens (every token
is given: no text is generated). Prints bits per byte, and the share of positions with the greedy
token of the float32 cache. Two further lines per number of bits are without the change of basis
(`kvjax/attention/canonical.py`), and with its first part alone, which balances latents without
spreading channels. A second table has the time of a decode step of one sequence on this machine:
float32 in tiles as a quantised cache is read, float32 at once as the CPU reads it otherwise, and
both quantised caches, in turns.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import statistics
import time
from typing import NamedTuple
from unittest import mock

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import runner
from experiments.benchmarks.runner import Option
from kvjax.attention import canonical
from kvjax.cache import quantized
from kvjax.costs import formulas
from kvjax.data import loader, manifest, prepare
from kvjax.foundation import command_line, progress
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.kernels.decode_attention import xla
from kvjax.model import decoder as decoder_lib
from kvjax.model.decoder import Decoder
from kvjax.workdir import trained

CHUNK = 64
F32 = jnp.dtype(jnp.float32)


class Cache(NamedTuple):
    """A cache to measure.

    Attributes:
      dtype: as of --cache_dtype; "": float32.
      basis: "": as kvjax has it; "stored": without the change of basis; "balanced": without the
        spreading of channels.
      part: "key" or "value": only fields with that in their names are quantised; "": all fields.
    """

    dtype: str
    basis: str = ""
    part: str = ""


CACHES = (Cache(""), *(Cache(d, b) for d in quantized.BITS for b in ("", "stored", "balanced")))


@contextlib.contextmanager
def _only(cache: Cache):
    """Changes `canonical` and `quantized` to leave out what `cache` is without."""
    patches = []
    if cache.basis == "stored":
        patches.append(mock.patch.object(canonical, "change_basis", lambda *arguments: {}))
    if cache.basis == "balanced":
        patches.append(mock.patch.object(canonical, "spread_matrix", np.eye))
    if cache.basis:
        patches.append(mock.patch.object(canonical, "spread_field", lambda config: ""))
    if cache.part:
        stored = quantized.stored

        def part_of(entry, bits, owner):
            kept = {
                name: field if cache.part in name else dataclasses.replace(field, keeps=True)
                for name, field in entry.items()
            }
            return stored(kept, bits, owner)

        patches.append(mock.patch.object(quantized, "stored", part_of))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _step(model, compute):
    """Returns a jitted step of a decoder, (tokens, cache) -> logits and cache, which is donated."""
    graph, weights = nnx.split(Decoder(model, compute))

    def step(weights, tokens_BT, cache):
        decoder = nnx.merge(graph, weights)
        counts_B = jnp.full((tokens_BT.shape[0],), tokens_BT.shape[1], jnp.int32)
        x_BTD, cache = decoder(tokens_BT, cache, counts_B)
        return decoder.logits(x_BTD), cache

    jitted = jax.jit(step, donate_argnums=2)
    return lambda tokens_BT, cache: jitted(weights, tokens_BT, cache)


def scores(model, compute, tokens_BT: np.ndarray, cache: Cache) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nats of every token but the first, and the greedy token before it."""
    B, T = tokens_BT.shape
    with _only(cache):
        step = _step(model, compute)
        arrays = decoder_lib.allocate(model.config, compute, batch=B, capacity=T)
        nats, greedy = [], []
        for start in range(0, T - 1, CHUNK):
            chunk = tokens_BT[:, start : min(start + CHUNK, T - 1)]
            z_BTV, arrays = step(chunk, arrays)
            log_p_BTV = jax.nn.log_softmax(z_BTV)
            target = tokens_BT[:, start + 1 : start + 1 + chunk.shape[1], None]
            nats.append(-np.take_along_axis(np.asarray(log_p_BTV), target, axis=-1)[..., 0])
            greedy.append(np.asarray(jnp.argmax(z_BTV, axis=-1)))
    return np.concatenate(nats, axis=1), np.concatenate(greedy, axis=1)


def held_out(workdir: epath.Path, positions: int, rows: int) -> np.ndarray:
    """Returns tokens [rows, positions] of the validation text that a run's config names.

    Raises:
      UserError: not a workdir, or too little text.
    """
    data = trained.experiment_of(workdir).data
    tokenizer = str(workdir / manifest.TOKENIZER)  # a converted run's config has no other path
    data = dataclasses.replace(data, tokenizer=tokenizer, sequence_length=positions)
    dataset = loader.open_dataset(prepare.prepare(data))
    if (available := dataset.num_rows("validation")) < rows:
        raise UserError(
            f"--rows={rows}: the held-out text of {workdir} is {available} rows of {positions} "
            "tokens; give fewer"
        )
    batches = loader.validation_batches(dataset, sequence_length=positions, batch_size=rows)
    return next(iter(batches))[:, :positions]


def quality(
    workdir: epath.Path, positions: int, rows: int, caches: Sequence[Cache] = CACHES
) -> list[dict]:
    """Returns a row per cache; the first, in float32, is what others are compared with."""
    loaded = trained.load(workdir, dtype="float32")
    tokens_BT = held_out(workdir, positions, rows)
    bytes_BT = loaded.tokenizer.token_bytes()[tokens_BT[:, 1:]]  # 0: a special token, not counted
    results, wide = [], None
    for cache in caches:
        compute = dataclasses.replace(loaded.compute, cache_bits=quantized.bits_of(cache.dtype))
        nats, greedy = scores(loaded.model, compute, tokens_BT, cache)
        wide = greedy if wide is None else wide
        bits_per_byte = float(nats[bytes_BT > 0].sum() / np.log(2) / bytes_BT.sum())
        first = results[0]["bits_per_byte"] if results else bits_per_byte
        with _only(cache):
            bytes_per_token = formulas.cache_bytes_per_token(
                loaded.model.config, F32, compute.cache_bits
            )
        results.append(
            dict(
                workdir=workdir.name,
                cache=compute.cache_dtype,
                basis=cache.basis,
                part=cache.part,
                bytes_per_token=bytes_per_token,
                positions=nats.size,
                bits_per_byte=bits_per_byte,
                worse=bits_per_byte / first - 1,
                same_token=float((greedy == wide).mean()),
            )
        )
    return results


def step_times(workdir: epath.Path, length: int, repeats: int) -> dict[str, float]:
    """Returns median milliseconds of a step over `length` cached tokens, by way of reading."""
    loaded = trained.load(workdir, dtype="float32")
    ways = {
        "float32, in tiles": ("", xla.attend_in_tiles),
        "float32, at once": ("", xla.attend_at_once),
        **{name: (name, xla.attend_at_once) for name in quantized.BITS},
    }
    token, runs, times = np.zeros((1, 1), np.int32), {}, {name: [] for name in ways}
    for name, (dtype, attend) in ways.items():
        compute = dataclasses.replace(loaded.compute, cache_bits=quantized.bits_of(dtype))
        step = _step(loaded.model, compute)
        capacity = length + 4 * repeats
        cache = decoder_lib.allocate(loaded.model.config, compute, batch=1, capacity=capacity)
        cache = dataclasses.replace(cache, lengths=jnp.full((1,), length, jnp.int32))

        def tiles(inputs, cache, first_B, tile_kv, stripes, softcap):
            return xla.attend_in_tiles(inputs, cache, first_B, tile_kv, stripes, softcap=softcap)

        chosen = tiles if attend is xla.attend_in_tiles else attend
        with mock.patch.object(xla, "attend_at_once", chosen):
            _, cache = jax.block_until_ready(step(token, cache))  # traced and compiled here
        runs[name] = step, cache
    for _ in range(repeats):
        for name, (step, cache) in runs.items():
            start = time.perf_counter()
            _, cache = jax.block_until_ready(step(token, cache))
            times[name].append(1e3 * (time.perf_counter() - start))
            runs[name] = step, cache
    return {name: statistics.median(each) for name, each in times.items()}


def _check(options: runner.Options) -> None:
    """Raises a UserError for a run that is not there or cannot have these caches."""
    for name in options.workdir:
        mechanisms = trained.find(name).experiment.model.mechanisms
        for bits in quantized.BITS.values():
            quantized.check(mechanisms, bits)


def _measure(options: runner.Options) -> dict:
    result = dict(quality=[], steps=[], length=options.length)
    with progress.waiting("reading held-out text through caches") as doing:
        for name in options.workdir:
            doing.at(name)
            workdir = trained.find(name).workdir
            result["quality"] += quality(workdir, options.positions, options.rows)
            if options.repeats:
                times = step_times(workdir, options.length, options.repeats)
                result["steps"].append(dict(workdir=workdir.name, ms=times))
    return result


_QUALITY = {
    "run": "{workdir}",
    "cache": lambda r: r["cache"] + (f", {r['basis']} basis" if r["basis"] else ""),
    "bytes per token": "{bytes_per_token:,}",
    "bits per byte": "{bits_per_byte:.5f}",
    "worse by": "{worse:+.3%}",
    "same greedy token": "{same_token:.2%}",
}


def _show(result: dict, out: Output) -> None:
    out.table(*runner.table(_QUALITY, result["quality"]))
    if result["steps"]:
        out.say(f"\nMilliseconds of a step of one sequence after {result['length']:,} tokens")
        ways = list(result["steps"][0]["ms"])
        cells = [[r["workdir"], *(f"{r['ms'][way]:.2f}" for way in ways)] for r in result["steps"]]
        out.table(("run", *ways), cells)


def _record_name(options: runner.Options) -> str:
    return f"quantized/{'-'.join(epath.Path(workdir).name for workdir in options.workdir)}"


main = runner.benchmark(
    _record_name,
    __doc__,
    dict(
        workdir=Option(["runs/lrkv_tiny"], "workdir of a trained run; may be repeated"),
        positions=Option(256, "tokens of a row", least=2 * CHUNK),
        rows=Option(32, "number of rows", least=1),
        length=Option(8192, "cached tokens of the timed step", least=1),
        repeats=Option(20, "timed steps of each cache; 0: none", least=0),
    ),
    _measure,
    _show,
    check=_check,
)

if __name__ == "__main__":
    command_line.run(main)
