"""Compares all mechanisms on the same tokens, with MHA's parameters.

    python -m experiments.studies.small_caches [--seeds=3] [--save]
    python -m experiments.studies.small_caches --mechanisms=mha,lrkv,gla_narrow

Trains the tiny configs of configs/ and configs/rivals.py, with MLP widths that make their parameter
counts nearly MHA's. Initial weights and data order depend on the seed alone, so each run is
compared with MHA of the same seed. All mechanisms are trained with the first seed, then with the
next. --save writes the result after each run; a later call resumes from it. Prints a table with 95
% intervals (Student's t over seeds).
"""

from collections.abc import Mapping, Sequence
import json
import pathlib

from experiments import record
from experiments.studies import grid, side_by_side
from experiments.studies.demo_size import TOKENS_PER_STEP
from experiments.studies.grid import Cell, FinishedRuns, Run
from experiments.studies.options import Parser, local_folder, shown
from kvjax import config as config_lib
from kvjax.analysis.words import mechanism_names
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config

FIRST = "mha"  # the reference of differences and of parameter counts
OWN = (
    *("mha", "lrkv", "gqa", "mla", "mqa", "mla_paper", "lrkv_gqa", "lrkv_shared_rope"),
    *("lrkv_no_rope", "thin_keys", "factored", "kv_tied", "qk_tied", "qkv_tied"),
)
_NARROW = "gla gta mfa mlra2 mlra4 shared_kv tpa mla_lrkv mfa_kr tpa_kv_only".split()
_WIDE = ("mfa_kr", "tpa_kv_only", "tpa", "gta", "shared_kv", "mfa", "mla_lrkv")
NARROW = tuple(f"{name}_narrow" for name in _NARROW)
WIDE = tuple(f"{name}_wide" for name in _WIDE)
EVERY = (*OWN, *NARROW, *WIDE)
STEPS = 256  # 2.1M tokens
NAME = "small_caches"
SPEED = "small_caches_speed"  # the result of the study of that name


def file_of(name: str) -> pathlib.Path:
    """Returns the config of a mechanism."""
    is_rival = name in (*NARROW, *WIDE)
    return CONFIGS / (f"rivals.py:{name}_tiny" if is_rival else f"{name}_tiny.py")


def cells(names: Sequence[str]) -> list[Cell]:
    """Returns the cells of these mechanisms, each with about as many parameters as MHA."""
    mha = config_lib.resolve(load_config(file_of(FIRST)))
    count = formulas.parameters(mha.model)["total"]
    return [
        Cell(
            name,
            file_of(name),
            grid.matched(file_of(name), count),
            "" if name == FIRST else FIRST,
        )
        for name in names
    ]


def runs_of(names: Sequence[str], seeds: int, steps: int) -> list[Run]:
    """Returns runs in training order: each mechanism once, then with the next seed."""
    made = cells(names)
    return [Run(cell, seed, steps) for seed in range(seeds) for cell in made]


def _speeds() -> dict[str, dict]:
    """Returns the measurements of `small_caches_speed` by mechanism."""
    file = record.RESULTS / f"{SPEED}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return {row["mechanism"]: row for row in rows}


def rows(finished: FinishedRuns) -> list[dict]:
    """Returns a row per mechanism with runs, earlier ones included; the largest cache first."""
    all_cells, speeds, table = cells(tuple(finished.runs)), _speeds(), []
    runs_by_cell = finished.by_cell(all_cells)
    for cell in all_cells:
        if cell.name not in runs_by_cell:
            continue
        model, speed = Run(cell, 0, finished.steps).experiment.model, speeds.get(cell.name, {})
        row = dict(mechanism=cell.name, kind=mechanism_names(model.mechanisms))
        row |= dict(mlp_dim=model.block.mlp_dim) | grid.row(cell, finished, runs_by_cell)
        for key in ("difference", "difference_half_interval"):
            row[key.replace("difference", "against_mha")] = row.pop(key)
        for key in ("training_tokens_per_second", "decode_tokens_per_second"):
            row[key] = speed.get(key)
        table.append(row)
    return sorted(table, key=lambda r: -r["cache_bytes"])


_HEADER = (
    *("config", "mechanism", "cache bytes per token (bfloat16)", "MLP", "training tokens/s"),
    *("decoding tokens/s", "seeds", "bits per byte", "against MHA"),
)


def _cells(r: Mapping) -> tuple:
    def rate(name: str) -> str:
        return f"{r[name]:,.0f}" if r[name] else "-"

    return (
        r["mechanism"],
        r["kind"],
        f"{r['cache_bytes']:,}",
        r["mlp_dim"],
        rate("training_tokens_per_second"),
        rate("decode_tokens_per_second"),
        len(r["seeds"]),
        shown(r, "bpb", ".4f"),
        shown(r, "against_mha", "+.4f", missing=""),
    )


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME)
    parser.count("steps", STEPS, f"training steps of 8,192 tokens ({STEPS}: 2.1M)")
    parser.names("mechanisms", EVERY)
    parser.runs(f"runs/{NAME}")
    options = parser.parse(arguments)
    options.runs = local_folder(options.runs)

    def figures_of(finished: FinishedRuns) -> dict:
        return dict(tokens=options.steps * TOKENS_PER_STEP, rows=rows(finished))

    table = ("rows", _HEADER, _cells)
    return side_by_side.study(NAME, cells(options.mechanisms), options, figures_of, [table])


if __name__ == "__main__":
    command_line.run(main)
