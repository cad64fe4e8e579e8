"""How long the runs of the studies took, by the results they are kept in.

    python -m experiments.tables.study_times [--markdown]

Hours are those of each run, added up: most had one core, some two, or other work beside them. A run
that kept no seconds took its tokens by its rate. Studies share runs: the second column of hours
leaves out runs that results further up hold too. Results that do not say how long their runs took
are not here, as analysis/head_diversity.
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
    """What a result says of its runs.

    Attributes:
      name: of the result, as in small_caches.
      runs: how many it holds.
      seconds: of all of them, one after another.
      own_seconds: of those that no study before has.
      by_rate: how many of the runs kept no seconds, but a rate.
    """

    name: str
    runs: int
    seconds: float
    own_seconds: float
    by_rate: int


def studies(results: pathlib.Path) -> list[Study]:
    """All results that keep the seconds of their runs, by name."""
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
    """Equal of one run in two results."""

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
    hours = lambda seconds: f"{seconds / 3600:.1f}"
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
