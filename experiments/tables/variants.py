"""Tables of config files with variants: each variant's shapes, sizes, budget and note.

`scaling_table` writes them to experiments/reports/configs.md.
"""

import dataclasses
import math
import pathlib
import runpy

import jax.numpy as jnp

from kvjax import config as config_lib
from kvjax.attention import kind_of
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS

COLUMNS = (
    *("variant", "layers", "width", "heads", "attention", "MLP", "parameters"),
    *("without input embedding", "against MHA", "cached elements"),
    *("cache bytes per token", "rows per step", "tokens per row", "chips per row"),
    *("GFLOP per trained token", "steps", "tokens", "exaFLOPs", "note"),
)
_WORDS = ("variant", "attention", "note")
_BF16 = jnp.dtype(jnp.bfloat16)
ONE_PASS = 700  # approximate steps of a config whose run is one pass over its conversations


def files() -> list[pathlib.Path]:
    """Returns the shipped config files that have variants."""
    return [
        path for path in sorted(CONFIGS.glob("*.py")) if command_line.configs_of(path) != [path]
    ]


def markdown() -> str:
    """Returns a section for each file: its docstring and a row for each variant."""
    title = "## Configs that are variants of one file, from shapes\n"
    lead = (
        "Given as `--config=configs/ranks.py:lrkv_r16_128m`. Cached elements are per token and "
        "layer,\nwithout the float32 1/rms of normed keys; cache bytes are per token, in bfloat16, "
        "of all layers.\n"
    )
    return "\n".join([title, lead, *map(_section, files())])


def _section(path: pathlib.Path) -> str:
    names = runpy.run_path(str(path))
    lines = [COLUMNS, ["---" if column in _WORDS else "---:" for column in COLUMNS]]
    for config in command_line.configs_of(path):
        variant = command_line.config_label(config)
        experiment = config_lib.resolve(command_line.load_config(config))
        row = figures(experiment)
        row |= {"variant": f"`{variant}`", "note": names["NOTES"].get(variant, "")}
        lines.append([row[column] for column in COLUMNS])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    title = f"### [configs/{path.name}](../../configs/{path.name})"
    return f"{title}\n\n{names['__doc__'].strip()}\n\n{table}\n"


def figures(run: Experiment) -> dict[str, str]:
    """Returns the figures of a config, by column."""
    model, block = run.model, run.model.block
    mechanism, counts = model.mechanisms[0], formulas.parameters(model)
    flops = formulas.training_flops_per_token(model, run.data.sequence_length)
    steps = run.train.num_steps or ONE_PASS
    tokens = steps * run.tokens_per_step
    exaflops = tokens * flops / 1e18
    entry = mechanism.entry().values()
    return {
        "layers": str(block.num_layers),
        "width": str(block.d_model),
        "heads": f"{mechanism.num_heads} of {mechanism.value_dim}",
        "attention": _attention(run),
        "MLP": f"{block.mlp_dim:,}",
        "parameters": f"{counts['total']:,}",
        "without input embedding": f"{counts['total'] - counts['embedding']:,}",
        "against MHA": _against_mha(run, counts["total"]),
        "cached elements": f"{sum(math.prod(f.shape) for f in entry if not f.wide):,}",
        "cache bytes per token": f"{formulas.cache_bytes_per_token(model, _BF16):,}",
        "rows per step": str(run.train.batch_size),
        "tokens per row": f"{run.data.sequence_length:,}",
        "chips per row": str(run.mesh.sequence),
        "GFLOP per trained token": f"{flops / 1e9:.3f}",
        "steps": f"{steps:,}",
        "tokens": f"{tokens / 1e9:.3g}B" if tokens >= 1e9 else f"{tokens / 1e6:.1f}M",
        "exaFLOPs": f"{exaflops:,.0f}" if exaflops >= 100 else f"{exaflops:.3g}",
    }


def _attention(run: Experiment) -> str:
    """Returns the mechanism's kind and the keys that differ from their defaults."""
    mechanism = run.model.mechanisms[0]
    keys = (
        f"{field.name} {getattr(mechanism, field.name)}"
        for field in dataclasses.fields(mechanism)
        if getattr(mechanism, field.name) != field.default
        and field.name not in ("num_heads", "value_dim")
    )
    return f"{kind_of(mechanism)}: {', '.join(keys)}"


def _against_mha(run: Experiment, parameters: int) -> str:
    """Returns the difference in parameters from MHA of the same scale in %; "" without MHA."""
    mha = CONFIGS / f"mha_{run.name.rpartition('_')[2]}.py"
    if not mha.exists():
        return ""
    model = config_lib.resolve(command_line.load_config(mha)).model
    return f"{100 * (parameters / formulas.parameters(model)['total'] - 1):+.3f} %"
