"""Measures the diversity of heads in tiny models by mechanism, for comparison with LRKV's table 5.

    python -m experiments.studies.head_diversity [--mechanisms=mha,lrkv,gqa,mqa] [--save]
    python -m experiments.studies.head_diversity --saved   # prints the saved result

Trains the tiny configs as `language_models` does, with three seeds, and with snapshots at a few
steps and of the initial weights. Then computes figures of `kvjax.analysis`: effective ranks of
heads' bilinear forms before and after training, and one figure of each other report. Initial
weights and data order depend on the seed alone, so runs of the same seed are compared. Runs and
their figures go to --runs, and resume.
"""

import argparse
from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import json
import pathlib
import sys

from etils import epath

from experiments import record
from experiments.analysis import head_tables, numbers as numbers_lib
from experiments.analysis.head_tables import Findings, Run, Runs
from experiments.record import EXPERIMENTS
from experiments.studies import code as code_lib, grid, side_by_side
from experiments.studies.demo_size import TOKENS_PER_STEP, tiny
from experiments.studies.finished_runs import claim
from experiments.studies.options import Parser
from kvjax.analysis.words import mechanism_names
from kvjax.convert import model as model_lib
from kvjax.foundation import command_line, json_text, progress, runtime
from kvjax.foundation.checkout import CONFIGS, PACKAGE
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import write_atomically
from kvjax.foundation.output import Output
from kvjax.sweep import runs as runs_lib
from kvjax.training import loop
from kvjax.workdir import metrics, trained

OTHERS = (
    *("mla", "kv_tied", "qk_tied", "qkv_tied", "thin_keys", "factored", "lrkv_gqa"),
    *("lrkv_shared_rope", "lrkv_no_rope", "kv_tied_gqa", "kv_tied_mqa"),
)
NAME = "analysis/head_diversity"  # name of the result
SNAPSHOTS = 4  # per run, beside its initial weights
FILE = "head_diversity.json"  # in a workdir: the run's figures
_MEASURES = (PACKAGE / "analysis", EXPERIMENTS / "analysis", pathlib.Path(__file__))  # compute FILE


# -- runs ------------------------------------------------------------------------------------------


def training_run(mechanism: str, steps: int, seed: int) -> grid.Run:
    """Returns a run of a tiny config with snapshots."""
    snapshots = {"train.snapshot_every": max(1, steps // SNAPSHOTS)}
    return grid.Run(grid.Cell(mechanism, tiny(mechanism), snapshots), seed, steps)


def check(runs: Iterable[grid.Run], folder: epath.Path) -> None:
    """Raises a UserError for folders with runs of other configs or other code."""
    for training in runs:
        if why := side_by_side.refused(training, folder, mix=False):
            raise UserError(f"--runs = {folder}: {training.name} {why}; give another")


def run(training: grid.Run, folder: epath.Path) -> Run:
    """Trains and measures a run, unless both are done by the current code."""
    workdir = folder / training.name
    if not runs_lib.is_finished(training, folder):
        grid.begin(training, workdir)
        with contextlib.redirect_stdout(sys.stderr):
            loop.train(training.config, workdir)
    file, code = workdir / FILE, code_lib.code_of(_MEASURES)
    figures = json_text.parse(file.read_text()) if file.exists() else {}
    if figures.pop("code", None) != code:
        with progress.waiting(f"measuring {workdir.name}"):
            figures = dataclasses.asdict(measure(workdir))
        write_atomically(file, json.dumps(figures | dict(code=code), indent=1) + "\n")
        figures = json_text.parse(file.read_text())
        del figures["code"]
    return _read(figures)


def _read(figures: dict) -> Run:
    """Returns a run from its JSON."""
    steps = {int(step): numbers for step, numbers in figures["steps"].items()}
    return Run(**figures | dict(steps=steps))


def saved() -> tuple[Runs, dict]:
    """Returns the runs of the saved result, and the whole result.

    Raises:
      UserError: there is none, or it is damaged.
    """
    file = epath.Path(record.RESULTS / f"{NAME}.json")
    result = json_text.read_object(file, "--save writes it")
    runs = {
        m: {int(seed): _read(run) for seed, run in seeds.items()}
        for m, seeds in result["runs"].items()
    }
    return runs, result


def measure(workdir: epath.Path) -> Run:
    """Measures a finished run from its metrics, its model and its snapshots."""
    snapshots = {
        snapshot.step: model_lib.TrainedModel(snapshot) for snapshot in trained.snapshots(workdir)
    }
    if 0 not in snapshots:
        raise UserError(f"{workdir} has no snapshot of its first weights: give another --runs")
    request = None  # effective ranks need no text
    records = metrics.read_records(workdir / metrics.METRICS)
    return Run(
        bits_per_byte=[r["validation_bpb"] for r in records if "validation_bpb" in r][-1],
        trained=numbers_lib.of_model(model_lib.TrainedModel(workdir)),
        untrained=numbers_lib.of_model(snapshots[0], trained=False),
        steps={
            step: numbers_lib.diversity(snapshot, request) for step, snapshot in snapshots.items()
        },
    )


# -- the command -----------------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, NAME, trains=False)
    known = sorted(path.stem.removesuffix("_tiny") for path in CONFIGS.glob("*_tiny.py"))
    parser.names("mechanisms", known, (*head_tables.ROWS, *OTHERS))
    parser.count("steps", 128, "training steps of 8,192 tokens (128: 1.05M)")
    add = parser.add_argument
    add("--runs", default="runs/head_diversity", help="folder of the runs (runs/head_diversity)")
    add("--saved", action="store_true", help="print the saved result; train nothing")
    options = parser.parse(arguments)
    if not options.runs:
        raise UserError("--runs= is empty: give a folder, as runs/head_diversity")
    options.runs = runtime.folder("--runs", options.runs)
    if "://" not in str(options.runs):
        record.check_folder("--runs", pathlib.Path(options.runs))
    if options.save and not options.saved:
        _check_saved(options)
    return options


def _check_saved(options: argparse.Namespace) -> None:
    """Raises a UserError if saving would drop mechanisms, seeds or steps of the saved result."""
    file = record.RESULTS / f"{NAME}.json"
    claim(file)
    if not file.exists():
        return
    runs, result = saved()
    lost = [name for name in runs if name not in options.mechanisms]
    seeds = max((seed for by_seed in runs.values() for seed in by_seed), default=-1) + 1
    steps = result["tokens"] // TOKENS_PER_STEP
    had = {
        "mechanisms": f"{', '.join(lost)} too" if lost else "",
        "seeds": f"{seeds} seeds" if options.seeds < seeds else "",
        "steps": f"runs of {steps} steps" if options.steps != steps else "",
    }
    for option, difference in had.items():
        if difference:
            raise UserError(
                f"--{option} --save: {file.name} has {difference}, which would be lost: include "
                "them, or move it away"
            )


def main(arguments: Sequence[str]) -> None:
    """Trains and measures the missing runs, and prints the tables."""
    options = _options(arguments)
    if options.saved:
        runs, before = saved()
        _print(Findings(runs, before["mechanisms"]), before["tokens"], options)
        return
    runtime.start()
    order = [(name, seed) for seed in range(options.seeds) for name in options.mechanisms]
    trainings = {(name, seed): training_run(name, options.steps, seed) for name, seed in order}
    check(trainings.values(), options.runs)
    runs: Runs = {name: {} for name in options.mechanisms}
    data: dict[str, str] = {}
    for (name, seed), training in trainings.items():
        command_line.say(f"{name}, seed {seed} of {options.seeds}")
        runs[name][seed] = run(training, options.runs)
        first_run = data.setdefault(grid.data_of(options.runs / training.name), training.name)
        if len(data) > 1:
            message = f"{first_run} was trained on other data than {next(iter(data.values()))}"
            raise UserError(f"--runs = {options.runs}: {message}; give another")
    resolved = {m: trainings[m, 0].experiment for m in runs}
    names = {m: mechanism_names(found.model.mechanisms) for m, found in resolved.items()}
    tokens = options.steps * next(iter(resolved.values())).tokens_per_step
    _print(Findings(runs, names), tokens, options)


def _print(findings: Findings, tokens: int, options: argparse.Namespace) -> None:
    out = Output(options)
    for table in head_tables.tables(findings):
        out.show(table)
        out.say()
    for verdict in head_tables.verdicts(findings):
        out.say(f"- {verdict}")
    result = dict(tokens=tokens) | head_tables.as_json(findings)
    record.record(NAME, result, out, save=options.save and not options.saved)


if __name__ == "__main__":
    command_line.run(main)
