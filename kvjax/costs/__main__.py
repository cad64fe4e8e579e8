"""Prints what a model costs: parameters, FLOPs, its KV cache, and the time of a decode step.

    python -m kvjax.costs --model=hf://HuggingFaceTB/SmolLM2-135M --device=h200
    python -m kvjax.costs --model=~/models/Llama-3-8B/config.json --context=131072
    python -m kvjax.costs --config=configs/lrkv_2p5b.py --device=h200 --batch=16
    python -m kvjax.costs --config=configs/lrkv_2p5b.py --all --device=h200
    python -m kvjax.costs --config=configs/lrkv_2p5b.py --all --details --chips=8
    python -m kvjax.costs --config=configs/lrkv_2p5b.py --cache_dtype=int8

--model prints a table of a published model's KV cache: one row for the model as it is, and one for
each mechanism that could replace its attention. No weights are read.

--config prints a config's parameters, training FLOPs and costs of decoding, and for each device the
largest batch and the shortest decode step. --chips adds cache bytes and bytes read per chip, for a
cache sharded by tokens and by heads. --all prints one table with a row for every config of the same
scale, relative to MHA; --details adds the tables of each config.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
import functools
import pathlib

import jax.numpy as jnp

from kvjax import config as config_lib
from kvjax.cache import quantized
from kvjax.costs import by_mechanism, formulas, published
from kvjax.costs.by_mechanism import DTYPES, Setting
from kvjax.foundation import command_line, lists, progress
from kvjax.foundation.configuration import at_least, between, one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware import datasheets
from kvjax.hardware.datasheets import Device

CONTEXTS = (8_192, 32_768, 131_072, 1_048_576)
MAX_CONTEXT = 1 << 40
SPLITS = ("tokens", "heads")  # how a cache is sharded over chips


def report(
    experiment: config_lib.Experiment,
    *,
    batch: int,
    dtype: jnp.dtype,
    on: list[Device],
    chips: int = 1,
    cache_bits: int | None = None,
    contexts: Sequence[int] = CONTEXTS,
) -> dict:
    """Returns all costs of one config, JSON-able.

    `largest_batch` and `least_ms`, the shortest time of a decode step, are for one chip of each
    device; `least_ms` is None where `batch` sequences do not fit. With several chips, the result
    also has cache bytes per token and chip, and the GB that each chip reads per step if weights are
    replicated.

    Args:
      batch: sequences decoded together.
      dtype: dtype of weights and, unless `cache_bits` is given, of the cache.
      on: devices to compute `largest_batch` and `least_ms` for.
      chips: number of chips that the cache is sharded over.
      cache_bits: bits per element of a quantised cache; None: not quantised.
      contexts: numbers of cached tokens per sequence.
    """
    config = experiment.model
    read = functools.partial(formulas.chip_cache_bytes, config, dtype, cache_bits, chips=chips)
    by_chip = {split: read(by=split) for split in SPLITS}
    decode = []
    for length in contexts:
        shape = dict(length=length, dtype=dtype, cache_bits=cache_bits)
        cost = formulas.decode_cost(config, batch=batch, **shape)
        per_token = formulas.cache_bytes_per_token(config, dtype, cache_bits)
        largest = {d.name: formulas.largest_batch(config, device=d, **shape) for d in on}
        decode.append(
            dict(
                context=length,
                cache_bytes_per_token=per_token,
                cache_gb=length * per_token / 1e9,  # layers with a window hold all tokens too
                gflop_per_token=cost.flops_per_token / 1e9,
                gb_per_token=cost.bytes_per_token / 1e9,
                flop_per_byte=cost.intensity,
                largest_batch=largest,
                least_ms={
                    d.name: 1e3 * cost.seconds(d) if largest[d.name] >= batch else None for d in on
                },
            )
        )
        if chips > 1:
            decode[-1]["gb_per_chip_and_step"] = {
                split: (cost.weight_bytes + batch * read(by=split, length=length)) / 1e9
                for split in SPLITS
            }
    return dict(
        config=experiment.name,
        parameters=formulas.parameters(config),
        sequence_length=experiment.data.sequence_length,
        training_flops_per_token=formulas.training_flops_per_token(
            config, experiment.data.sequence_length
        ),
        weight_bytes=formulas.weight_bytes(config, dtype),
        **(dict(cache_bytes_per_token_and_chip=by_chip) if chips > 1 else {}),
        decode=decode,
    )


def _resolve(file: pathlib.Path, overrides: list[str]) -> config_lib.Experiment:
    config = command_line.load_config(file, overrides)
    try:
        return config_lib.resolve(config)
    except UserError as error:
        raise UserError(f"{file.name}: {error}") from error


def _print(
    out: Output,
    reports: list[dict],
    *,
    batch: int,
    dtype: str,
    cache_dtype: str,
    on: list[Device],
    chips: int,
) -> None:
    cache_dtype = cache_dtype or dtype
    names = [device.name for device in on]
    ridges = ", ".join(f"{device.name} {device.ridge:.0f}" for device in on)
    out.say("Parameters, and training FLOPs per token (forward and backward, all T keys)")
    out.table(
        ["config", *formulas.COMPONENTS, "total", "T", "GFLOP per trained token"],
        [
            (
                r["config"],
                *(f"{r['parameters'][name]:,}" for name in (*formulas.COMPONENTS, "total")),
                r["sequence_length"],
                f"{r['training_flops_per_token'] / 1e9:.3f}",
            )
            for r in reports
        ],
    )
    out.say(f"\nDecoding in {dtype}, batch {batch}: logical bytes, 1 GB = 10^9 bytes")
    sizes = [f"cache bytes per token, {cache_dtype}", f"cache GB per sequence, {cache_dtype}"]
    figures = ("cache_gb", "gflop_per_token", "gb_per_token")
    _by_context(
        out,
        reports,
        [*sizes, "GFLOP per token", "GB read per token", "FLOP per byte"],
        lambda d: (
            f"{d['cache_bytes_per_token']:,}",
            *(f"{d[key]:.3f}" for key in figures),
            f"{d['flop_per_byte']:.2f}",
        ),
    )
    out.say(f"\nRidges, FLOP per byte (datasheets): {ridges}")
    room = f"{1 - formulas.RESERVE:.0%}"
    out.say(f"Largest batch on one chip: weights and cache in {room} of its memory")
    _by_context(out, reports, names, lambda d: [f"{n:,}" for n in d["largest_batch"].values()])
    out.say(
        f"\nShortest step of {batch} sequences, ms: bytes / bandwidth, or FLOPs / peak if longer"
    )
    _by_context(
        out,
        reports,
        names,
        lambda d: ["-" if ms is None else f"{ms:.3g}" for ms in d["least_ms"].values()],
    )
    if chips > 1:
        _print_chips(out, reports, batch=batch, dtype=cache_dtype, chips=chips)


def _print_chips(out: Output, reports: list[dict], *, batch: int, dtype: str, chips: int) -> None:
    out.say(
        f"\nThe cache on {chips} chips, split by tokens or by heads: bytes per token and chip "
        f"in {dtype}"
    )
    rows = []
    for r in reports:
        tokens, heads = (r["cache_bytes_per_token_and_chip"][split] for split in SPLITS)
        whole = r["decode"][0]["cache_bytes_per_token"]
        figures = f"{whole:,}", f"{tokens:,.0f}", f"{heads:,}", f"{heads / tokens:.2f}"
        rows.append((r["config"], *figures))
    header = [f"by {split}" for split in SPLITS]
    out.table(["config", "whole", *header, "by heads / by tokens"], rows)
    out.say(f"\nGB read per chip and step of {batch} sequences, with all weights on each chip")
    _by_context(
        out, reports, header, lambda d: [f"{gb:.3f}" for gb in d["gb_per_chip_and_step"].values()]
    )


def _by_context(
    out: Output, reports: list[dict], header: Sequence[str], cells: Callable[[dict], Iterable[str]]
) -> None:
    """Prints a table with a row per config and context length."""
    rows = [(r["config"], f"{d['context']:,}", *cells(d)) for r in reports for d in r["decode"]]
    out.table(["config", "context", *header], rows)


_OF_CONFIGS = ("all", "details", "batch")  # options that --model does not have


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__, config=True)
    add = parser.add_argument
    add(
        "--model",
        default="",
        help="instead of --config: a config.json, its folder, a GGUF file, hf://OWNER/NAME",
    )
    text = "tokens per sequence (--model: the model's context; --all: 32768; else four lengths)"
    add("--context", type=int, help=text)
    add(
        "--device",
        action="append",
        help=f"one of {', '.join(datasheets.DEVICES)}; may be repeated (all; --model and "
        "--all: none)",
    )
    add("--batch", type=int, default=1, help="sequences decoded together (1)")
    add("--chips", type=int, default=1, help="number of chips that a cache is sharded over (1)")
    add("--dtype", default=DTYPES[0], help=f"dtype of weights and cache: {', '.join(DTYPES)}")
    text = "dtype of the cache if not --dtype: int8 or int4, with a float32 scale per token and row"
    add("--cache_dtype", default="", help=text)
    add("--all", action="store_true", help="one table of every config of the same scale")
    add("--details", action="store_true", help="with --all: also the tables of each config")
    parser.add_output()
    return parser


def main(arguments: list[str]) -> None:
    """Prints the tables."""
    parser = _parser()
    options = parser.parse(arguments)
    at_least("--batch", options.batch, 1)
    at_least("--chips", options.chips, 1)
    if options.context is not None:
        between("--context", options.context, 1, MAX_CONTEXT)
    one_of("--dtype", options.dtype, DTYPES)
    with command_line.naming_options(options):
        quantized.bits_of(options.cache_dtype)
    names = list(dict.fromkeys(options.device or ()))
    for name in names:
        lists.one("--device", name, datasheets.DEVICES)
    on = [datasheets.get(name) for name in names]
    if options.details and not options.all:
        raise UserError("--details: only with --all; without it these tables are always printed")
    if options.model:
        _check_alone(options, parser, arguments)
        shape = published.read(options.model)
        context = options.context or shape.context
        if not context:
            raise UserError(
                f"--context is missing: the config of {options.model} gives no context length"
            )
        return by_mechanism.print_model(Output(options), shape, _setting(options, context, on))
    return _print_configs(options, on)


def _setting(options: argparse.Namespace, context: int, on: list[Device]) -> Setting:
    keys = ("chips", "dtype", "cache_dtype", "batch")
    shape = {key: getattr(options, key) for key in keys}
    return Setting(context=context, on=on, **shape)


def _check_alone(
    options: argparse.Namespace, parser: command_line.Parser, arguments: list[str]
) -> None:
    """Raises a UserError for options that --model does not have."""
    invalid = [name for name in _OF_CONFIGS if getattr(options, name) != parser.get_default(name)]
    if any(argument.partition("=")[0] == "--config" for argument in arguments):
        invalid.append("config")
    if invalid or options.overrides:
        other = f"--{invalid[0]}" if invalid else options.overrides[0].partition("=")[0]
        raise UserError(
            f"{other}: cannot be combined with --model={options.model}; leave one of them out"
        )


def _print_configs(options: argparse.Namespace, on: list[Device]) -> None:
    file = options.config
    files = [file]
    if options.all:  # the given config first, so that its errors are reported first
        scale = command_line.config_label(file).rpartition("_")[2]
        for other in command_line.configs_beside(file):
            same_scale = command_line.config_label(other).endswith(f"_{scale}")
            if same_scale and other.name != file.name:
                files.append(other)
    devices = on or [datasheets.get(name) for name in datasheets.DEVICES]
    sizes = dict(batch=options.batch, chips=options.chips)
    dtypes = dict(dtype=options.dtype, cache_dtype=options.cache_dtype)
    bits = quantized.bits_of(options.cache_dtype)
    dtype = jnp.dtype(options.dtype)
    contexts = (options.context,) if options.context else CONTEXTS
    out, experiments, reports = Output(options), [], []
    with progress.waiting("counting") as status:
        for config in files:
            status.at(command_line.config_label(config))
            experiment = _resolve(config, options.overrides)
            experiments.append(experiment)
            shape = dict(dtype=dtype, cache_bits=bits, contexts=contexts)
            reports.append(report(experiment, **sizes, **shape, on=devices))
    reports.sort(key=lambda r: -r["decode"][0]["cache_bytes_per_token"])
    result = dict(name="costs", **sizes, **dtypes, configs=reports)
    result["cache_dtype"] = options.cache_dtype or options.dtype
    if options.all:
        setting = _setting(options, options.context or by_mechanism.CONTEXT, on)
        result["by_mechanism"] = by_mechanism.print_configs(out, experiments, setting)
    if options.details:
        out.say()
    if options.details or not options.all:
        _print(out, reports, **sizes, **dtypes, on=devices)
    out.result(result)


if __name__ == "__main__":
    command_line.run(main)
