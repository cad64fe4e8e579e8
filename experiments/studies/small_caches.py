"""Compares all mechanisms on the same tokens, with MHA's parameters.

    python -m experiments.studies.small_caches [--seeds=3] [--save]
    python -m experiments.studies.small_caches --mechanisms=mha,lrkv,gla_narrow

The tiny configs of configs/ and configs/rivals.py, with MLP widths that bring their parameters
nearest to MHA's. A seed draws initial weights and data order, equal for all mechanisms, so
differences from MHA are taken seed by seed. All mechanisms are trained with the first seed, then
with the next. --save writes the result after each run; a later call resumes from it. Prints a table
with 95 % intervals (Student's t over seeds).
"""

import argparse
from collections.abc import Mapping, Sequence
import json
import pathlib

import jax.numpy as jnp

from experiments import record
from experiments.studies import grid, side_by_side
from experiments.studies.demo_size import TOKENS_PER_STEP
from experiments.studies.grid import Cell, Kept, Run
from experiments.studies.kept import claim
from kvjax import config as config_lib
from kvjax.analysis.words import mechanism_names
from kvjax.costs import formulas
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.configuration import at_least
from kvjax.foundation.intervals import Estimate, difference, estimate
from kvjax.foundation.output import Output

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
    first = config_lib.resolve(load_config(file_of(FIRST)))
    count = formulas.parameters(first.model)["total"]
    return [Cell(name, file_of(name), grid.matched(file_of(name), count)) for name in names]


def runs_of(names: Sequence[str], seeds: int, steps: int) -> list[Run]:
    """Returns runs in training order: each mechanism once, then with the next seed."""
    made = cells(names)
    return [Run(cell, seed, steps) for seed in range(seeds) for cell in made]


def _speeds() -> dict[str, dict]:
    """Returns the measurements of `small_caches_speed` by mechanism."""
    file = record.RESULTS / f"{SPEED}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return {row["mechanism"]: row for row in rows}


def row(cell: Cell, experiment: config_lib.Experiment, kept: Mapping[str, dict]) -> dict:
    """Returns the figures of one mechanism.

    Args:
      kept: figures of runs by mechanism and seed, with at least one seed of this mechanism.
    """
    mine, first = (
        {seed: run["bpb"] for seed, run in kept.get(name, {}).items()}
        for name in (cell.name, FIRST)
    )
    speeds = _speeds().get(cell.name, {})
    found = dict(
        mechanism=cell.name,
        kind=mechanism_names(experiment.model.mechanisms),
        mlp_dim=experiment.model.block.mlp_dim,
        parameters=formulas.parameters(experiment.model)["total"],
        cache_bytes=formulas.cache_bytes_per_token(experiment.model, jnp.dtype(jnp.bfloat16)),
        seeds=sorted(mine),
        training_tokens_per_second=speeds.get("training_tokens_per_second"),
        decode_tokens_per_second=speeds.get("decode_tokens_per_second"),
        **_named("bpb", estimate([mine[seed] for seed in sorted(mine)])),
    )
    against = None if cell.name == FIRST else difference(mine, first)
    return found | _named("against_mha", against)


def _named(name: str, found: Estimate | None) -> dict:
    if found is None:
        return {name: None, f"{name}_half_interval": None}
    return {name: found.mean, f"{name}_half_interval": found.half}


_HEADER = (
    *("config", "mechanism", "cache bytes per token (bfloat16)", "MLP", "training tokens/s"),
    *("decoding tokens/s", "seeds", "bits per byte", "against MHA"),
)


def _cells(r: dict) -> tuple:
    def number(name: str, digits: str) -> str:
        if r[name] is None:
            return ""
        return Estimate(r[name], r[f"{name}_half_interval"]).shown(digits)

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
        number("bpb", ".4f"),
        number("against_mha", "+.4f"),
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs per mechanism (3)")
    add("--steps", type=int, default=STEPS, help=f"training steps of 8,192 tokens ({STEPS}: 2.1M)")
    add("--mechanisms", default=",".join(EVERY), help=f"tiny configs ({','.join(EVERY)})")
    side_by_side.add_options(parser, f"runs/{NAME}")
    add("--save", action="store_true", help=f"write experiments/results/{NAME}.json")
    parser.add_output()
    options = parser.parse(arguments)
    options.mechanisms = lists.names("--mechanisms", options.mechanisms, EVERY)
    for key in ("seeds", "steps", "processes"):
        at_least(f"--{key}", getattr(options, key), 1)
    options.runs = side_by_side.check_runs(options.runs)
    record.check(options.save)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    out, file = Output(options), record.RESULTS / f"{NAME}.json"
    runs = runs_of(options.mechanisms, options.seeds, options.steps)
    if options.save:
        claim(file)
    kept = Kept(file, options.steps, mix=options.mix, fresh=options.fresh)

    def save(failed: Mapping[str, str]) -> None:
        if options.save:
            record.keep(NAME, _result(options.steps, kept, failed))

    failed = side_by_side.train_missing(runs, kept, options, save)
    result = _result(options.steps, kept, failed)
    out.table(_HEADER, map(_cells, result["rows"]))
    for name, why in failed.items():
        out.say(f"- left out: {name}, {why}")
    record.record(NAME, result, out, save=options.save)
    return 1 if failed else 0


def _result(steps: int, kept: Kept, failed: Mapping) -> dict:
    """Returns the study's result from all finished runs, requested now or before."""
    there: dict[str, dict[int, dict]] = {}
    every = {cell.name: cell for cell in cells(tuple(kept.runs))}
    for name, cell in every.items():
        for seed in sorted(kept.runs[name]):
            if found := kept.of(Run(cell, seed, steps)):
                there.setdefault(name, {})[seed] = found
    rows = [row(every[name], Run(every[name], 0, steps).experiment, there) for name in there]
    rows.sort(key=lambda r: -r["cache_bytes"])
    result = dict(steps=steps, tokens=steps * TOKENS_PER_STEP, rows=rows, failed=dict(failed))
    return result | kept.as_json()


if __name__ == "__main__":
    command_line.run(main)
