"""Five mechanisms of LRKV's paper at depth 8: 25 times demo size's parameters, 19 times its tokens.

    python -m kvjax.data.prepare --source='~/texts/*.jsonl' --vocab_size=8192 --sequence_length=1024
    python -m experiments.studies.depth_8 --data=FOLDER [--processes=3] [--save]  # on a GPU

The LRKV paper scales its models by depth alone. Depth 8 gives width 512, 4 heads of 128, rank 64
for LRKV, a latent of 192 and a RoPE key of 64 for MLA, and two KV heads for GQA. Models are trained
in bfloat16 by the recipe of configs/*_128m.py on rows of 1,024 tokens, 32 per step, each row at
most once. --data is a folder from `kvjax.data.prepare`. To train several runs on one GPU set
XLA_PYTHON_CLIENT_PREALLOCATE=false. Initial weights and data order depend on the seed alone, so
each run is compared with MHA of the same seed. Prints bits per byte with 95 % intervals (Student's
t over seeds), the tokens that a model needs to reach MHA's final loss, and differences from MHA by
step, also of interrupted runs.
"""

import argparse
from collections.abc import Mapping, Sequence
import itertools
import os
import pathlib

from etils import epath

from experiments import record
from experiments.studies import grid, side_by_side
from experiments.studies.finished_runs import claim
from experiments.studies.grid import Cell, FinishedRuns, Run
from experiments.studies.options import Parser, estimated, local_folder, shown
from kvjax.foundation import command_line, json_text, runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import difference, estimate
from kvjax.sweep import runs as runs_lib

NAME = "depth_8"
DEPTH, HEADS, LENGTH, ROWS, VOCABULARY = 8, 4, 1024, 32, 8192
TOKENS_PER_STEP = LENGTH * ROWS
EVALUATIONS = 10  # per run, evenly spaced
FIRST = "mha"
# Overrides of config.attention in the configs for 128M parameters.
_HEADS = {"num_heads": HEADS, "num_kv_heads": HEADS, "num_bases": HEADS}
MECHANISMS = {
    "mha": _HEADS,
    "lrkv": _HEADS | {"num_bases": 1},
    "gqa": _HEADS | {"num_kv_heads": 2, "num_bases": 2},
    "mqa": _HEADS | {"num_kv_heads": 1, "num_bases": 1},
    "mla": {"num_heads": HEADS, "latent_dim": 192},
}


def cell(mechanism: str, data: str, steps: int) -> Cell:
    """Returns a mechanism's cell, trained on prepared rows."""
    sections = dict(
        model=dict(num_layers=DEPTH, d_model=64 * DEPTH, mlp_dim=4 * 64 * DEPTH),
        attention=MECHANISMS[mechanism],
        data=dict(
            source=f"prepared:{data}",
            vocab_size=VOCABULARY,
            sequence_length=LENGTH,
            specials="bos",
        ),
        train=dict(
            batch_size=ROWS,
            grad_accumulation=1,
            eval_every=max(1, steps // EVALUATIONS),
            eval_rows=0,
        ),
        compute=dict(dtype="bfloat16", remat="none"),
    )
    keys = {f"{name}.{key}": x for name, section in sections.items() for key, x in section.items()}
    against = "" if mechanism == FIRST else FIRST
    return Cell(mechanism, CONFIGS / f"{mechanism}_128m.py", keys, against)


def rows(cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns one row per mechanism with runs."""
    runs_by_cell, table = finished.by_cell(cells), []
    goals = grid.bits(runs_by_cell, FIRST)
    for cell in cells:
        runs = runs_by_cell.get(cell.name)
        if runs:
            shares = [
                share
                for seed, run in runs.items()
                if cell.against and seed in goals
                if (share := reached(run["curve"], goals[seed], finished.steps)) is not None
            ]
            shared = estimate(shares) if shares and len(shares) == len(runs) else None
            row = dict(mechanism=cell.name) | grid.row(cell, finished, runs_by_cell)
            table.append(row | estimated("of_tokens", shared))
    return table


def by_step(curves: Mapping[str, Mapping[int, Mapping[int, float]]]) -> list[dict]:
    """Returns differences from MHA by mechanism, at every step at which both were evaluated.

    Args:
      curves: bits per byte by mechanism, seed and step; curves of interrupted runs are shorter.
    """
    table = []
    for name in curves:
        steps = {step for curve in curves[name].values() for step in curve}
        for step in sorted(steps) if name != FIRST else ():
            mine, theirs = (
                {
                    seed: curve[step]
                    for seed, curve in curves.get(mechanism, {}).items()
                    if step in curve
                }
                for mechanism in (name, FIRST)
            )
            if gap := difference(mine, theirs):
                row = dict(mechanism=name, step=step, seeds=sorted(mine.keys() & theirs.keys()))
                table.append(row | estimated("difference", gap))
    return table


def reached(curve: Mapping, goal: float, steps: int) -> float | None:
    """Returns the share of the steps after which a curve first reaches `goal`; None if never.

    Interpolates linearly between evaluations.
    """
    before = None
    for step, bpb in sorted((int(step), bpb) for step, bpb in curve.items()):
        if bpb <= goal:
            if before is None:
                return step / steps
            (first, high), fall = before, before[1] - bpb
            return (first + (step - first) * (high - goal) / fall) / steps
        before = step, bpb
    return None


_HEADER = ("mechanism", "parameters", "cache bytes per token (bfloat16)", "seeds")
_HEADER += ("bits per byte", "from MHA", "of the tokens, to be as good as MHA")


def _cells(r: Mapping) -> tuple:
    sizes = (r["mechanism"], f"{r['parameters']:,}", f"{r['cache_bytes']:,}", len(r["seeds"]))
    quality = shown(r, "bpb", ".4f"), shown(r, "difference", "+.4f")
    return *sizes, *quality, shown(r, "of_tokens", ".3f")


_STEP_HEADER = ("mechanism", "tokens", "seeds", "bits per byte, from MHA")


def _step_cells(r: Mapping) -> tuple:
    tokens, gap = f"{r['step'] * TOKENS_PER_STEP:,}", shown(r, "difference", "+.4f")
    return r["mechanism"], tokens, len(r["seeds"]), gap


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, NAME)
    parser.add_argument("--data", default="", help="a folder from `kvjax.data.prepare`")
    parser.count("steps", 600, "training steps of 32,768 tokens (600: 19.7M)")
    parser.names("mechanisms", MECHANISMS)
    parser.runs(f"runs/{NAME}")
    options = parser.parse(arguments)
    command_line.require(options, data="a folder that `kvjax.data.prepare` wrote")
    options.data = pathlib.Path(runtime.folder("--data", options.data))
    options.text = text_of(options.data)
    available = options.text["splits"]["train"]["rows"]
    if options.steps * ROWS > available:
        raise UserError(
            f"--steps={options.steps}: takes {options.steps * ROWS:,} rows, {options.data} has "
            f"{available:,} to train on: give at most {available // ROWS} steps, or more text"
        )
    options.runs = local_folder(options.runs)
    return options


def text_of(data: pathlib.Path) -> dict:
    """Returns the manifest of a prepared folder: tokenizer, splits, source.

    Raises:
      UserError: there is no manifest, or rows or vocabulary have other sizes.
    """
    file = epath.Path(data / "dataset.json")
    advice = f"--data={data}: give a folder that `kvjax.data.prepare` wrote"
    manifest = json_text.read_object(file, advice)
    try:
        text = {key: manifest[key] for key in ("tokenizer", "splits", "xz_bits_per_byte")}
        source = pathlib.Path(manifest["config"]["source"]).name
        sizes = manifest["config"]["sequence_length"], text["tokenizer"]["vocab_size"]
        int(text["splits"]["train"]["rows"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} is no manifest of prepared rows: {advice}") from error
    if sizes != (LENGTH, VOCABULARY):
        raise UserError(
            f"--data={data}: has rows of {sizes[0]} tokens of a vocabulary of {sizes[1]}: must be "
            f"{LENGTH} and {VOCABULARY}"
        )
    return dict(source=source) | text


def earlier(file: pathlib.Path, text: Mapping, *, fresh: bool) -> dict:
    """Returns the curves of interrupted runs in an existing result, by mechanism and seed.

    Raises:
      UserError: its runs were trained on another text.
    """
    if fresh or not file.exists():
        return {}
    result = json_text.read_object(epath.Path(file), "move it away, or give --fresh")
    if result.get("data") != text:
        raise UserError(
            f"--data: has another text ({text['source']}) than the runs in "
            f"{os.path.relpath(file)}: give theirs, or --fresh to begin a new result"
        )
    return {
        name: {int(seed): curve for seed, curve in seeds.items()}
        for name, seeds in result.get("stopped", {}).items()
    }


def _curves(runs: Mapping, stopped: Mapping) -> dict[str, dict[int, dict[int, float]]]:
    """Returns the curves of finished and interrupted runs, by mechanism, seed and step."""
    curves = {}
    for name in MECHANISMS:
        finished = {seed: run["curve"] for seed, run in runs.get(name, {}).items()}
        curves[name] = {
            seed: {int(step): bpb for step, bpb in curve.items()}
            for seed, curve in (finished | stopped.get(name, {})).items()
        }
    return curves


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the tables; returns 1 if a run failed."""
    options = _options(arguments)
    file = record.RESULTS / f"{NAME}.json"
    if options.save:
        claim(file)
    before = earlier(file, options.text, fresh=options.fresh)
    cell_by_mechanism = {name: cell(name, str(options.data), options.steps) for name in MECHANISMS}
    cells = [cell_by_mechanism[name] for name in options.mechanisms]

    def figures_of(finished: FinishedRuns) -> dict:
        stopped: dict[str, dict[int, dict]] = {}
        curves = {(m, seed): curve for m, seeds in before.items() for seed, curve in seeds.items()}
        for cell, seed in itertools.product(cells, range(options.seeds)):
            run = Run(cell, seed, options.steps)
            if curve_now := runs_lib.curve(options.runs / run.name):
                curves[cell.name, seed] = curve_now
        for (mechanism, seed), curve in curves.items():
            if not finished.of(Run(cell_by_mechanism[mechanism], seed, options.steps)):
                stopped.setdefault(mechanism, {})[seed] = curve
        figures = dict(tokens=options.steps * TOKENS_PER_STEP, data=options.text)
        figures |= dict(rows=rows(list(cell_by_mechanism.values()), finished), stopped=stopped)
        return figures | dict(by_step=by_step(_curves(finished.runs, stopped)))

    tables = (("rows", _HEADER, _cells), ("by_step", _STEP_HEADER, _step_cells))
    return side_by_side.study(NAME, cells, options, figures_of, tables)


if __name__ == "__main__":
    command_line.run(main)
