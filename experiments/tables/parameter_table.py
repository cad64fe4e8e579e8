"""Exact parameter counts, cache bytes and FLOPs of every config in configs/, from shapes.

    python -m experiments.tables.parameter_table [--markdown]

Variants of one file are in the tables of scaling_table.py. Source: LRKV paper, section 5 (scales)
and Table 2 (cache), with the corrections in experiments/reports/configs.md. --markdown prints the
table of that page.
"""

import pathlib

import jax.numpy as jnp

from experiments import record
from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.output import Output

SCALES = ("tiny", "128m", "2p5b", "6p3b")
_HEADER = (
    *("config", "parameters", "without input embedding", "in attention", "cache bytes per token"),
    *("of MHA", "GFLOP per trained token", "against MHA"),
)


def load(path: pathlib.Path) -> config_lib.Experiment:
    return config_lib.resolve(load_config(path))


def row(experiment: config_lib.Experiment) -> dict:
    """Returns one config's figures; cache bytes are per token, all layers, in bfloat16."""
    counts = formulas.parameters(experiment.model)
    return dict(
        config=experiment.name,
        parameters=counts["total"],
        without_embedding=counts["total"] - counts["embedding"],
        attention=counts["attention"],
        cache_bytes=formulas.cache_bytes_per_token(experiment.model, jnp.dtype(jnp.bfloat16)),
        flops=formulas.training_flops_per_token(experiment.model, experiment.data.sequence_length),
    )


def _order(r: dict) -> tuple:
    """Returns the sort key: scale (unknown scales last), then the largest cache first."""
    scale = _scale(r)
    return SCALES.index(scale) if scale in SCALES else len(SCALES), scale, -r["cache_bytes"]


def _scale(r: dict) -> str:
    return r["config"].rpartition("_")[2]


def _cells(r: dict, mha: dict | None) -> tuple[str, ...]:
    """Returns a row of the table; cells against MHA are empty if the scale has no MHA config."""
    counts = (r[key] for key in ("parameters", "without_embedding", "attention", "cache_bytes"))
    return (
        f"`{r['config']}`",
        *(f"{count:,}" for count in counts),
        f"{r['cache_bytes'] / mha['cache_bytes']:.2%}" if mha else "",
        f"{r['flops'] / 1e9:.3f}",
        f"{r['flops'] / mha['flops'] - 1:+.1%}" if mha else "",
    )


def main(arguments: list[str]) -> None:
    """Prints the table."""
    parser = command_line.Parser(__doc__)
    parser.add_output()
    out = Output(parser.parse(arguments))
    with progress.waiting("counting parameters") as doing:
        rows = []
        for path in command_line.config_files(CONFIGS):
            if not path.is_file():  # a variant
                continue
            doing.at(path.stem)
            rows.append(row(load(path)))
    rows.sort(key=_order)
    base = {_scale(r): r for r in rows if r["config"].startswith("mha_")}
    out.table(_HEADER, [_cells(r, base.get(_scale(r))) for r in rows])
    record.record("parameter_table", dict(rows=rows), out, save=False)


if __name__ == "__main__":
    command_line.run(main)
