"""Prints the training time of the studies' runs, by result.

    python -m experiments.tables.study_times [--markdown]

Hours are summed over runs, most of which used one CPU core, some two or a shared machine. For a run
without recorded seconds they are its tokens over its rate. Studies share runs: the second column
of hours leaves out runs that an earlier result already counts. Results without times of their runs,
such as analysis/head_diversity, are not listed.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
import pathlib
from typing import NamedTuple

from experiments import record
from experiments.record import RESULTS
from kvjax.foundation import command_line
from kvjax.foundation.output import Output


@dataclasses.dataclass(frozen=True)
class Study:
    """Training times of one result's runs.

    Attributes:
      name: of the result, such as small_caches.
      runs: number of runs.
      seconds: sum over all runs.
      own_seconds: sum over runs that no earlier result has.
      by_rate: number of runs whose seconds follow from their rate.
    """

    name: str
    runs: int
    seconds: float
    own_seconds: float
    by_rate: int


def studies(results: pathlib.Path) -> list[Study]:
    """Returns all results with training times of their runs, by name."""
    found, seen = [], set()
    for path in sorted(results.rglob("*.json")):
        result = json.loads(path.read_text())
        timed = list(_timed(result)) if isinstance(result, dict) else []
        if not timed:
            continue
        found.append(
            Study(
                name=path.relative_to(results).with_suffix("").as_posix(),
                runs=len(timed),
                seconds=sum(run.seconds for run in timed),
                own_seconds=sum(run.seconds for run in timed if run not in seen),
                by_rate=sum(run.by_rate for run in timed),
            )
        )
        seen.update(timed)
    return found


class _Run(NamedTuple):
    """A run's time; equal for the same run in two results."""

    identity: str
    seconds: float
    by_rate: bool


def _timed(result: dict) -> Iterator[_Run]:
    by_name = result.get("runs")
    for by_seed in by_name.values() if isinstance(by_name, dict) else ():
        for run in by_seed.values() if isinstance(by_seed, dict) else ():
            if not isinstance(run, dict) or "identity" not in run:
                continue
            rate, tokens = run.get("tokens_per_second"), result.get("tokens")
            if run.get("seconds"):
                yield _Run(run["identity"], run["seconds"], by_rate=False)
            elif rate and tokens:
                yield _Run(run["identity"], tokens / rate, by_rate=True)


def main(arguments: Sequence[str]) -> None:
    """Prints the table and its sum."""
    parser = command_line.Parser(__doc__)
    parser.add_output()
    out = Output(parser.parse(arguments))
    found = studies(RESULTS)

    def hours(seconds):
        return f"{seconds / 3600:.1f}"

    out.table(
        ("result", "runs", "of them by their rate", "hours", "not in results above"),
        [(f"`{s.name}`", s.runs, s.by_rate, hours(s.seconds), hours(s.own_seconds)) for s in found],
    )
    total = sum(study.own_seconds for study in found)
    out.say(f"\n{hours(total)} hours in all, runs that studies share counted once.")
    rows = [dataclasses.asdict(study) for study in found]
    record.record("study_times", dict(rows=rows, seconds=total), out, save=False)


if __name__ == "__main__":
    command_line.run(main)
