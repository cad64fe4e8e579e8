"""Profiles decode kernels: times on the device present, or a compiler's figures for another one.

    python -m kvjax.kernels.profile                                   # on the device present
    python -m kvjax.kernels.profile --mechanisms=mha,gqa,lrkv --batch=1,8,64 --length=1024,131072
    python -m kvjax.kernels.profile --device=v5e --mechanisms=lrkv     # static: nothing runs
    python -m kvjax.kernels.profile --check                           # compare with the definition
    python -m kvjax.kernels.profile --tune                            # tile sizes, tuned.json

Decode attention of one layer over full caches. On the device present: time per call without
dispatch, compared with the bandwidths of the datasheet and of a copy, with other implementations
and with libraries. For another device nothing runs: a TPU's compiler gives its schedule, as bundles
per token against the cycles that HBM needs for the token's bytes; a GPU's compiler gives registers,
spills and shared memory.
"""

import argparse
from collections.abc import Sequence
import io
import itertools
import os
import pathlib
import sys

from etils import epath
import jax

from kvjax.foundation import command_line, lists, progress, provenance, target, theme
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.hardware import datasheets
from kvjax.kernels.decode_attention import shapes, tuning
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.kernels.profile import agreement, contenders, measured, static, tpu_static

OPS = ("decode_attention",)
DEVICES = (*datasheets.DEVICES, "cpu")
_LENGTHS = (1024, 4096, 16384, 65536, 131072)
_BATCHES, _BATCHES_LENGTH = (1, 2, 4, 8, 16, 32, 64), 32_768
_CPU_LENGTHS = (2048, 8192)  # shorter caches need a longer ring, which compiles longer
_MECHANISMS = "mha,gqa,lrkv,lrkv_no_rope,mla"


def plot(rows: Sequence[dict], file: pathlib.Path) -> None:
    """Plots cache GB/s over tokens, a line per mechanism, implementation and batch, as PNG.

    A mechanism has its colour; its implementations and batches differ by dash and marker.
    """
    figure, lines = _matplotlib(file).Figure, {}
    for r in rows:
        if "gbps" in r:
            name = f"{r['mechanism']} {r['implementation']}, batch {r['batch']}"
            lines.setdefault((r["mechanism"], name), []).append((r["length"], r["gbps"]))
    picture = io.BytesIO()
    with theme.styled():
        axes = figure(figsize=(8.5, 5), layout="constrained").subplots()
        drawn: dict[str, int] = {}
        for (mechanism, name), points in lines.items():
            color = theme.color(mechanism)
            i = drawn[color] = drawn.get(color, -1) + 1
            how = dict(color=color, marker=theme.MARKERS[i % 8], linestyle=theme.DASHES[i % 4])
            axes.plot(*zip(*points, strict=True), label=name, **how)
        lengths = sorted({x for points in lines.values() for x, _ in points})
        axes.set(xscale="log", xlabel="cached tokens", ylabel="GB/s of cache")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid()
        if lines:
            axes.figure.legend(loc="outside right upper", fontsize=10)
        axes.figure.savefig(picture, format="png", dpi=150)
    target.write(epath.Path(file.parent), {file.name: picture.getvalue()}, "--plot")


def _matplotlib(file: pathlib.Path):
    try:
        from matplotlib import figure
    except ImportError as error:
        raise UserError(f"--plot={file}: needs matplotlib, which is not installed") from error
    return figure


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--op", default="decode_attention", choices=OPS)
    add("--mechanisms", default=_MECHANISMS, help="names of the model's shapes, see shapes.py")
    add("--device", default="", choices=DEVICES, help="device to profile (the one present)")
    add("--model", default="d36", choices=tuple(shapes.SHAPES), help="(d36)")
    add("--batch", help="numbers of sequences, as in 1,8,64; combined with every --length")
    text = "cached tokens per sequence; default: a sweep of lengths, then of batches (few on a CPU)"
    add("--length", help=text)
    add("--implementations", help=f"some of {', '.join(contenders.NAMES)}")
    add("--blocks", default="512,1024", help="two tile sizes, in tokens, for a static TPU profile")
    add("--rounds", help="measurements of each, taken in turns (7; on a CPU 3)")
    add("--milliseconds", default="50", help="approximate duration of a measurement")
    add("--tune", action="store_true", help="search tile sizes and write tuned.json")
    text = "compare outputs with the definition; exit status 1 if one is wrong or none ran"
    add("--check", action="store_true", help=text)
    add("--save", default="", metavar="FILE", help="write the result to this file, as JSON")
    add("--plot", default="", metavar="FILE", help="write the length sweep to this file, as PNG")
    parser.add_output()
    o = parser.parse(arguments)
    o.mechanisms = lists.names("--mechanisms", o.mechanisms, tuple(shapes.SHAPES[o.model]))
    if o.implementations is not None:
        o.implementations = lists.names("--implementations", o.implementations, contenders.NAMES)
    for name in ("batch", "length", "rounds", "milliseconds"):
        if (text := getattr(o, name)) is not None:
            setattr(o, name, lists.integers(f"--{name}", text))
    o.blocks = lists.integers("--blocks", o.blocks, 128)
    if len(o.blocks) != 2 or o.blocks[0] >= o.blocks[1]:
        raise UserError(f"--blocks {o.blocks}: must be two sizes, the smaller first")
    for name in ("tune", "check"):
        if getattr(o, name) and o.plot:
            raise UserError(f"--{name} --plot={o.plot}: --plot needs measurements")
    if o.check and o.tune:
        raise UserError("--check --tune: use one of them")
    if o.check and not set(o.implementations or ()) <= set(IMPLEMENTATIONS):
        raise UserError(f"--check: takes {', '.join(IMPLEMENTATIONS)}, not libraries")
    return o


def _points(o: argparse.Namespace, *, on_cpu: bool) -> tuple[tuple[int, int], ...]:
    """Returns (batch, length) of each point: --batch x --length, or else the default sweeps."""
    lengths = _CPU_LENGTHS if on_cpu else _LENGTHS
    if o.batch or o.length:
        return tuple(itertools.product(o.batch or (1,), o.length or lengths))
    if o.check:
        return agreement.CPU_POINTS if on_cpu else agreement.POINTS
    batches = () if on_cpu else _BATCHES
    return (*((1, length) for length in lengths), *((b, _BATCHES_LENGTH) for b in batches))


def _measured(o: argparse.Namespace, name: str | None, out: Output) -> dict:
    platform = jax.default_backend()
    default = contenders.default(platform)
    if o.check:
        default = tuple(name for name in default if name in IMPLEMENTATIONS)
    run = measured.Run(
        model=o.model,
        mechanisms=o.mechanisms,
        points=o.points,
        implementations=o.implementations or (default[:1] if o.tune else default),
        rounds=o.rounds[0] if o.rounds else 3 if platform == "cpu" else 7,
        target=o.milliseconds[0] / 1e3,
        device=name,
    )
    if o.tune:
        return _tuned(measured.tune(run, _print_row), out)
    if o.check:
        rows = agreement.check(run, _print_row)
        out.show(agreement.table(rows, run))
        return dict(rows=rows)
    rows, copied = measured.measure(run, _print_row)
    kind = jax.devices()[0].device_kind
    datasheet = datasheets.DEVICES.get(name)
    sheet = f"{datasheet.bandwidth / 1e9:,.0f} by datasheet, " if datasheet else ""
    title = (
        f"measured, {kind}, {run.dtype}: median and extremes of {run.rounds} rounds, one layer. "
        f"GB/s of logical cache bytes; {sheet}{copied / 1e9:,.1f} for a copy (read and written). "
        "MHA is timed in turns with each mechanism, public MHA at the same batch and length"
    )
    out.show(measured.table(rows, title))
    return dict(rows=rows, copy_gbps=copied / 1e9)


def _print_row(row: dict) -> None:
    """Prints a row on standard error at once, so that a stopped run leaves its first results."""
    result = row.get("why")
    if "gbps" in row:
        us = " to ".join(f"{1e6 * row['seconds'][key]:,.1f}" for key in ("low", "high"))
        result = f"{us} us, {row['gbps']:,.1f} GB/s"
    elif "worst" in row:
        result = f"worst {row['worst']:.1e}, {'agrees' if row['agrees'] else 'WRONG'}"
    elif "seconds" in row:
        sizes = row.get("parameters", "the default tile sizes")
        result = f"{1e6 * row['seconds']:,.1f} us with {sizes}"
    names = " ".join(filter(None, (row["mechanism"], row["implementation"])))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)  # clears the line that counts seconds
    command_line.say(f"{names}, {row['batch']} x {row['length']:,}: {result}")


def _tuned(rows: Sequence[dict], out: Output) -> dict:
    for r in rows:
        result = r.get("why") or f"{r['parameters']} under {r['key']}"
        out.say(f"{r['mechanism']} {r.get('implementation', 'tpu')}: {result}")
    return dict(tuned=rows)


def _static(o: argparse.Namespace, out: Output) -> dict:
    if o.device in tpu_static.CHIPS:
        if o.tune:
            return _tuned(static.tune_tpu(o), out)
        rows = static.tpu(o)
        out.show(static.tpu_table(tpu_static.CHIPS[o.device], rows))
        return dict(rows=rows)
    if o.tune:
        raise UserError(f"--tune --device={o.device}: needs the device, which is absent")
    rows = static.gpu(o)
    out.show(static.gpu_table(o.device, rows))
    return dict(rows=rows)


def _check_files(o: argparse.Namespace) -> None:
    """Raises a UserError for an output file that could not be written at the end."""
    if o.plot:
        _matplotlib(pathlib.Path(o.plot))
        target.check_file("--plot", o.plot)
    if o.tune:
        target.check(str(tuning.FILE.parent), [tuning.FILE.name], "--tune")
    if o.save:
        o.save = pathlib.Path(target.check_file("--save", o.save))
        provenance.check_commit("--save", o.save)


def main(arguments: list[str]) -> int:
    """Prints the tables; returns 1 if --check found a wrong output or none ran, else 0."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
    o = _options(arguments)
    known = datasheets.for_device(jax.devices()[0])
    present = known.name if known else "cpu" if jax.default_backend() == "cpu" else None
    is_static = bool(o.device) and o.device != present
    if is_static and o.device == "cpu":
        raise UserError("--device=cpu: set JAX_PLATFORMS=cpu")
    if is_static and o.check:
        raise UserError(f"--check --device={o.device}: needs the device, which is absent")
    if is_static and o.plot:
        raise UserError(f"--plot={o.plot}: --plot needs measurements; {o.device} is absent")
    on_cpu = not is_static and present == "cpu"
    o.points = _points(o, on_cpu=on_cpu)
    _check_files(o)
    out = Output(o)
    with progress.waiting("compiling" if is_static else "measuring"):
        result = _static(o, out) if is_static else _measured(o, present, out)
    name = o.device or present or jax.devices()[0].device_kind.replace(" ", "_")
    result = dict(name="kernels", op=o.op, model=o.model, device=name, static=is_static) | result
    out.result(result)
    if o.save:
        provenance.save(o.save, result, "libtpu", "torch", "nvidia-cudnn-cu13")
    if o.plot:
        plot(result["rows"], target.check_file("--plot", o.plot))
    return 1 if o.check and not agreement.all_agree(result["rows"]) else 0


if __name__ == "__main__":
    command_line.run(main)
