"""How long the runs of the studies took, by the results they are kept in.

    python -m experiments.tables.study_times [--markdown]

A run has a core to itself, so hours are those of a core. Studies share runs: the second column of
hours leaves out runs that results further up hold too. The last is how long the command took that
wrote the result, where it says so; it had only those runs to train that were not there yet.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import json
import pathlib

from experiments import record
from kvjax.foundation import command_line
from kvjax.foundation.checkout import RESULTS
from kvjax.foundation.output import Output


@dataclasses.dataclass(frozen=True)
class Study:
    """What a result says of its runs.

    Attributes:
      name: of the result, as in small_caches.
      runs: how many it holds.
      seconds: of all of them, each on its core.
      own_seconds: of those that no study before has.
      command_seconds: of the command that wrote the result; None if it does not say.
    """

    name: str
    runs: int
    seconds: float
    own_seconds: float
    command_seconds: float | None


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
                seconds=sum(run[1] for run in timed),
                own_seconds=sum(run[1] for run in timed if run not in seen),
                command_seconds=result.get("made_by", {}).get("process_seconds"),
            )
        )
        seen.update(timed)
    return found


def _timed(result: dict) -> Iterator[tuple[str, float]]:
    """What was asked of each run, and its seconds: both are the same of one run in two results.

    Those of a run that kept its rate alone are the result's tokens at that rate.
    """
    by_name = result.get("runs")
    for by_seed in by_name.values() if isinstance(by_name, dict) else ():
        for run in by_seed.values() if isinstance(by_seed, dict) else ():
            if not isinstance(run, dict) or "identity" not in run:
                continue
            rate, tokens = run.get("tokens_per_second"), result.get("tokens")
            seconds = run.get("seconds") or (tokens / rate if rate and tokens else None)
            if seconds:
                yield run["identity"], seconds


def main(arguments: Sequence[str]) -> None:
    """Prints the table and its sum."""
    parser = command_line.Parser(__doc__)
    parser.add_output()
    out = Output(parser.parse(arguments))
    found = studies(RESULTS)
    hours = lambda seconds: "" if seconds is None else f"{seconds / 3600:.1f}"
    out.table(
        ("result", "runs", "core hours", "not in results above", "the command, hours"),
        [
            (f"`{s.name}`", s.runs, *map(hours, (s.seconds, s.own_seconds, s.command_seconds)))
            for s in found
        ],
    )
    total = sum(study.own_seconds for study in found)
    out.say(f"\n{hours(total)} hours of a core in all, runs that studies share counted once.")
    rows = [dataclasses.asdict(study) for study in found]
    record.record("study_times", dict(rows=rows, seconds=total), out, save=False)


if __name__ == "__main__":
    command_line.run(main)
