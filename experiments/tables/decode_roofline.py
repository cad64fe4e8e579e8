"""Lower bounds of decode attention per mechanism: cache bytes, FLOPs and time by datasheet.

    python -m experiments.tables.decode_roofline [--scale=2p5b] [--length=32768] [--markdown]

One layer, one query per sequence, bfloat16: the variants of configs/rivals.py, and MHA, LRKV, GQA,
MQA and MLA. The time is the larger of cache bytes over HBM bandwidth and FLOPs over the
dense bfloat16 rate; a star marks times that FLOPs determine. Projections of the new token and
absorbing weights into the query are not included.
"""

from collections.abc import Sequence
import pathlib

import jax.numpy as jnp

from experiments import record
from experiments.tables.parameter_table import load
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.output import Output
from kvjax.hardware.datasheets import DEVICES, Device

SCALES = ("tiny", "128m", "2p5b")
_ROOT = ("mha", "lrkv", "gqa", "mqa", "mla")  # mechanisms with a config file of their own
_DEVICES = ("v5e", "v5p", "v4", "h200")
_BF16 = jnp.dtype(jnp.bfloat16)


def row(path: pathlib.Path) -> dict:
    """Returns cache bytes and FLOPs of a config per layer and cached token."""
    experiment = load(path)
    mechanism, base = experiment.model.mechanisms[0], experiment.model.block.angles_base
    return dict(
        config=experiment.name,
        heads=mechanism.num_heads,
        bytes=formulas.entry_bytes(mechanism.entry(), _BF16),
        flops=round(mechanism.decode_flops(base).per_key),
    )


def seconds(r: dict, length: int, device: Device) -> tuple[float, bool]:
    """Returns the lower bound in seconds for `length` cached tokens, and True if FLOPs set it."""
    by_bytes = length * r["bytes"] / device.bandwidth
    by_flops = length * r["flops"] / device.bf16_flops
    return max(by_bytes, by_flops), by_flops > by_bytes


def _cells(r: dict, mha: dict, length: int) -> tuple[str, ...]:
    times = (seconds(r, length, DEVICES[name]) for name in _DEVICES)
    return (
        f"`{r['config']}`",
        str(r["heads"]),
        f"{r['bytes']:,}",
        f"{r['bytes'] / mha['bytes']:.1%}",
        f"{r['flops']:,}",
        f"{r['flops'] / r['bytes']:.1f}",
        *(f"{1e6 * time:.1f}{'*' * is_flops}" for time, is_flops in times),
    )


def paths(scale: str) -> list[pathlib.Path]:
    """Returns the configs of a scale."""
    rivals = command_line.configs_of(CONFIGS / "rivals.py")
    own = [CONFIGS / f"{name}_{scale}.py" for name in _ROOT]
    return own + sorted(path for path in rivals if path.name.endswith(f"_{scale}"))


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = command_line.Parser(__doc__)
    parser.add_argument("--scale", default="2p5b", help=f"one of {', '.join(SCALES)}")
    parser.add_argument("--length", type=int, default=32_768, help="cached tokens")
    parser.add_output()
    options = parser.parse(arguments)
    one_of("--scale", options.scale, SCALES)
    at_least("--length", options.length, 1)
    out = Output(options)
    with progress.waiting("reading configs"):
        rows = [row(path) for path in paths(options.scale)]
    mha = rows[0]
    rows.sort(key=lambda r: (-r["bytes"], r["config"]))
    header = ("config", "heads", "bytes per token", "of MHA", "FLOPs per token", "FLOP/byte")
    header += tuple(f"{name}, μs" for name in _DEVICES)
    out.table(header, [_cells(r, mha, options.length) for r in rows])
    record.record("decode_roofline", dict(rows=rows, length=options.length), out, save=False)


if __name__ == "__main__":
    command_line.run(main)
