"""The command `python -m kvjax.costs`: what a config costs, as tables.

    python -m kvjax.costs --config=configs/lrkv_2p5b.py
    python -m kvjax.costs --config=configs/lrkv_2p5b.py --all --device=h200 --batch=16
    python -m kvjax.costs --config=configs/lrkv_2p5b.py --all --chips=8

Prints parameters and training FLOPs, then what decoding costs at four context lengths and what fits
the devices; with --chips, what each of several keeps and reads of a cache split by tokens or by
heads; with --all, for every config of the same scale side by side. The last line is JSON.
"""

import json
import pathlib
import sys

import jax.numpy as jnp

from kvjax import command_line
from kvjax import costs
from kvjax import devices
from kvjax import experiment as experiment_lib
from kvjax.configuration import at_least
from kvjax.configuration import one_of
from kvjax.devices import Device
from kvjax.errors import UserError
from kvjax.options import Parser

CONTEXTS = (8_192, 32_768, 131_072, 1_048_576)
SPLITS = ("tokens", "heads")  # of a cache, over several chips
_DTYPES = ("bfloat16", "float32")
_DEFAULT = pathlib.Path(__file__).parents[1] / "configs" / "lrkv_tiny.py"


def report(
    experiment: experiment_lib.Experiment,
    *,
    batch: int,
    dtype: jnp.dtype,
    on: list[Device],
    chips: int = 1,
) -> dict:
    """Everything the command says of one config, JSON-able.

    Largest batches and least milliseconds per step are by device, one chip; null where `batch`
    sequences do not fit it. With several chips, per chip: bytes of the cache per token, and GB read
    per step, weights whole on each.
    """
    config = experiment.model
    shape = dict(dtype=dtype, chips=chips)
    by_chip = {b: costs.chip_cache_bytes_per_token(config, **shape, by=b) for b in SPLITS}
    decode = []
    for length in CONTEXTS:
        cost = costs.decode_cost(config, length=length, batch=batch, dtype=dtype)
        fits = {
            d.name: costs.largest_batch(config, length=length, dtype=dtype, device=d) for d in on
        }
        decode.append(
            dict(
                context=length,
                cache_bytes_per_token=costs.cache_bytes_per_token(config, dtype),
                cache_gb=cost.cache_bytes / batch / 1e9,
                gflop_per_token=cost.flops_per_token / 1e9,
                gb_per_token=cost.bytes_per_token / 1e9,
                flop_per_byte=cost.intensity,
                largest_batch=fits,
                least_ms={
                    d.name: 1e3 * cost.seconds(d) if fits[d.name] >= batch else None for d in on
                },
            )
        )
        if chips > 1:
            read = lambda cache, cost=cost: cost.weight_bytes + cache * batch * cost.length
            decode[-1]["gb_per_chip_and_step"] = {b: read(c) / 1e9 for b, c in by_chip.items()}
    return dict(
        config=experiment.name,
        parameters=costs.parameters(config),
        sequence_length=experiment.data.sequence_length,
        training_flops_per_token=costs.training_flops_per_token(
            config, experiment.data.sequence_length
        ),
        weight_bytes=costs.weight_bytes(config, dtype),
        **(dict(cache_bytes_per_token_and_chip=by_chip) if chips > 1 else {}),
        decode=decode,
    )


def _resolve(file: pathlib.Path, overrides: list[str]) -> experiment_lib.Experiment:
    try:
        return experiment_lib.resolve(command_line.load_config(file, overrides))
    except UserError as error:
        raise UserError(f"{file.name}: {error}") from error


def _print(reports: list[dict], *, batch: int, dtype: str, on: list[Device], chips: int) -> None:
    names = [device.name for device in on]
    contexts = [(r["config"], d) for r in reports for d in r["decode"]]
    ridges = ", ".join(f"{device.name} {device.ridge:.0f}" for device in on)
    print("Parameters, and training FLOPs per token (forward and backward, all T keys)")
    _table(["config", *costs.PARTS, "total", "T", "GFLOP per trained token"])
    for r in reports:
        counts = [f"{r['parameters'][part]:,}" for part in (*costs.PARTS, "total")]
        flops = f"{r['training_flops_per_token'] / 1e9:.3f}"
        _row(r["config"], *counts, r["sequence_length"], flops)
    print(f"\nDecoding in {dtype}, batch {batch}: logical bytes, 1 GB = 10^9 bytes")
    sizes = ["cache bytes per token", "cache GB per sequence"]
    _table(["config", "context", *sizes, "GFLOP per token", "GB read per token", "FLOP per byte"])
    for config, d in contexts:
        figures = [f"{d[key]:.3f}" for key in ("cache_gb", "gflop_per_token", "gb_per_token")]
        cache = f"{d['cache_bytes_per_token']:,}"
        _row(config, f"{d['context']:,}", cache, *figures, f"{d['flop_per_byte']:.2f}")
    print(f"\nRidges, FLOP per byte (datasheets): {ridges}")
    print(f"Largest batch on one chip: weights and cache in {1 - costs.RESERVE:.0%} of its memory")
    _table(["config", "context", *names])
    for config, d in contexts:
        _row(config, f"{d['context']:,}", *(f"{n:,}" for n in d["largest_batch"].values()))
    print(f"\nLeast milliseconds per step of {batch}: bytes / bandwidth, or FLOPs / peak if more")
    _table(["config", "context", *names])
    for config, d in contexts:
        times = ("-" if ms is None else f"{ms:.3g}" for ms in d["least_ms"].values())
        _row(config, f"{d['context']:,}", *times)
    if chips > 1:
        _print_chips(reports, batch=batch, chips=chips)
    result = dict(name="costs", dtype=dtype, batch=batch, chips=chips, configs=reports)
    print(json.dumps(result))


def _print_chips(reports: list[dict], *, batch: int, chips: int) -> None:
    print(f"\nThe cache on {chips} chips, split by tokens or by heads: bytes per token and chip")
    _table(["config", "whole", *(f"by {b}" for b in SPLITS), "by heads / by tokens"])
    for r in reports:
        tokens, heads = (r["cache_bytes_per_token_and_chip"][b] for b in SPLITS)
        whole = r["decode"][0]["cache_bytes_per_token"]
        _row(r["config"], f"{whole:,}", f"{tokens:,.0f}", f"{heads:,}", f"{heads / tokens:.2f}")
    print(f"\nGB read per chip and step of {batch}, weights whole on each chip")
    _table(["config", "context", *(f"by {b}" for b in SPLITS)])
    for r in reports:
        for d in r["decode"]:
            read = (f"{gb:.3f}" for gb in d["gb_per_chip_and_step"].values())
            _row(r["config"], f"{d['context']:,}", *read)


def _table(header: list[str]) -> None:
    print("\n| " + " | ".join(header) + " |\n|---" + "|---:" * (len(header) - 1) + "|")


def _row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


def main(argv: list[str]) -> None:
    """Prints the tables and, last, one line of JSON; status 2 and a message for a bad option."""
    parser = Parser(__doc__)
    parser.add_argument("--config", default=str(_DEFAULT), help="override keys: --config.x.y=...")
    parser.add_argument("--device", action="append", help=f"of {', '.join(devices.DEVICES)}")
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded together")
    parser.add_argument("--chips", type=int, default=1, help="that a cache is split over")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache")
    parser.add_argument("--all", action="store_true", help="every config of the same scale")
    try:
        options, overrides = parser.parse_known_args(argv[1:])
        at_least("--batch", options.batch, 1)
        at_least("--chips", options.chips, 1)
        one_of("--dtype", options.dtype, _DTYPES)
        on = [devices.get(name) for name in dict.fromkeys(options.device or devices.DEVICES)]
        file = pathlib.Path(options.config)
        files = [file]
        if options.all and file.is_file():
            files = sorted(file.parent.glob(f"*_{file.stem.rpartition('_')[2]}.py"))
        shape = dict(batch=options.batch, chips=options.chips)
        shape |= dict(dtype=jnp.dtype(options.dtype), on=on)
        reports = [report(_resolve(f, overrides), **shape) for f in files]
    except (UserError, OSError) as error:
        print(f"kvjax: {error}", file=sys.stderr)
        sys.exit(2)
    reports.sort(key=lambda r: -r["decode"][0]["cache_bytes_per_token"])
    _print(reports, **shape | dict(dtype=options.dtype))
