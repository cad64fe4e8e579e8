"""Exact parameter counts, cache bytes and FLOPs of every config in configs/, from shapes.

    python -m experiments.parameter_table

Configs in folders of configs/ stand in the table of experiments/scaling_table.py. LRKV paper:
section 5 (scales), Table 2 (cache), with the corrections of the README. Prints a Markdown table and
one JSON line.
"""

import json
import pathlib

import jax.numpy as jnp

from kvjax import costs
from kvjax import experiment as experiment_lib
from kvjax.command_line import load_config

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
SCALES = ("tiny", "128m", "2p5b", "6p3b")


def load(path: pathlib.Path) -> experiment_lib.Experiment:
    return experiment_lib.resolve(load_config(path))


def row(experiment: experiment_lib.Experiment) -> dict:
    """Figures of one config; cache bytes are for bfloat16, per token, all layers."""
    counts = costs.parameters(experiment.model)
    return dict(
        config=experiment.name,
        parameters=counts["total"],
        without_embedding=counts["total"] - counts["embedding"],
        attention=counts["attention"],
        cache_bytes=costs.cache_bytes_per_token(experiment.model, jnp.dtype(jnp.bfloat16)),
        flops=costs.training_flops_per_token(experiment.model, experiment.data.sequence_length),
    )


def main() -> None:
    rows = [row(load(path)) for path in CONFIGS.glob("*.py")]
    rows.sort(key=lambda r: (SCALES.index(r["config"].rpartition("_")[2]), -r["cache_bytes"]))
    base = {r["config"].rpartition("_")[2]: r for r in rows if r["config"].startswith("mha_")}
    print(
        "| config | parameters | without input embedding | in attention | cache bytes per token |"
        " of MHA | GFLOP per trained token | against MHA |\n|---" + "|---:" * 7 + "|"
    )
    for r in rows:
        mha = base[r["config"].rpartition("_")[2]]
        print(
            f"| `{r['config']}` | {r['parameters']:,} | {r['without_embedding']:,} "
            f"| {r['attention']:,} | {r['cache_bytes']:,} "
            f"| {r['cache_bytes'] / mha['cache_bytes']:.2%} | {r['flops'] / 1e9:.3f} "
            f"| {r['flops'] / mha['flops'] - 1:+.1%} |"
        )
    print(json.dumps({"name": "parameter_table", "rows": rows}))


if __name__ == "__main__":
    main()
