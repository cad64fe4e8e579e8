"""Reads the benchmark scores of compared runs, the vertical axis of LRKV's figure 5.

`kvjax.evaluate` writes them to WORKDIR/evaluations/STEP/summary.json. WORKDIR is the run's own
workdir, or that of a run that was started from it, such as mid-training (parent.json names the
parent).
"""

from collections.abc import Mapping, Sequence

from etils import epath

from kvjax.compare import runs as runs_lib
from kvjax.compare.groups import Group
from kvjax.compare.runs import ComparedRun, SkippedRun
from kvjax.foundation import json_text, runtime
from kvjax.foundation.errors import UserError
from kvjax.workdir import lineage

_EVALUATIONS, _SUMMARY = "evaluations", "summary.json"
_RESTORE = "evaluate again, or remove it"
# Names of scores, by key of summary.json.
MEASURES = {"combined": "mean of the five tasks, %", "core": "CORE, %"}
Scores = Mapping[str, Mapping[str, float]]  # by run, by measure


def read(runs: Sequence[ComparedRun], names: Sequence[str]) -> tuple[Scores, list[SkippedRun]]:
    """Returns the scores of the compared runs, and the workdirs whose scores are not used.

    Args:
      runs: the compared runs.
      names: further workdirs with evaluations, or folders of workdirs.

    Raises:
      UserError: a name is not a folder.
    """
    by_workdir = {_resolved(run.workdir): run.name for run in runs}
    scores: dict[str, Mapping[str, float]] = {}
    left_out = []
    try:
        further = runs_lib.workdirs(names)
    except UserError as error:
        raise UserError(f"--scores: {error}") from error
    for name, workdir in [(run.name, run.workdir) for run in runs] + further:
        try:
            latest, parent = _latest(workdir), _parent(workdir)
        except (OSError, UserError) as error:
            left_out.append(SkippedRun(name, f"has scores that cannot be read: {error}"))
            continue
        if latest is None:
            if name not in by_workdir.values():
                left_out.append(SkippedRun(name, "was not evaluated", may_come=True))
            continue
        owner = by_workdir.get(_resolved(workdir)) or by_workdir.get(parent)
        if owner is None:
            left_out.append(SkippedRun(name, "is neither a compared run nor started from one"))
        elif owner in scores and name != owner:
            left_out.append(SkippedRun(name, f"is a second evaluation of {owner}"))
        else:
            scores[owner] = latest
    return scores, left_out


def points(groups: Sequence[Group], scores: Scores, measure: str) -> dict[str, dict[int, float]]:
    """Returns by group the score of each finished seed; leaves out groups without scores."""
    by_group = {}
    for group in groups:
        by_seed = {
            seed: scores[run.name][measure]
            for seed, run in group.runs.items()
            if run.finished and measure in scores.get(run.name, {})
        }
        if by_seed:
            by_group[group.name] = by_seed
    return by_group


def _latest(workdir: epath.Path) -> dict[str, float] | None:
    """Returns the scores of the latest evaluated step, in percent; None without an evaluation."""
    folder = workdir / _EVALUATIONS
    steps = [int(x.name) for x in folder.iterdir() if x.name.isdecimal()] if folder.exists() else []
    for step in sorted(steps, reverse=True):
        file = folder / str(step) / _SUMMARY
        if file.exists():
            return _scores(file)
    return None


def _scores(file: epath.Path) -> dict[str, float]:
    """Returns the scores of a summary.json, in percent."""
    summary = dict(json_text.read_record(file, _RESTORE))
    if isinstance(summary.get("combined"), dict):
        summary["combined"] = summary["combined"].get("value")
    for measure in MEASURES:
        score = summary.get(measure, 0.0)
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise UserError(f"{file}: {measure} is not a number: {_RESTORE}")
    return {measure: 100.0 * summary[measure] for measure in MEASURES if measure in summary}


def _parent(workdir: epath.Path) -> str | None:
    """Returns the resolved workdir that a run started from; None if it started from none."""
    file = workdir / lineage.PARENT
    if not file.exists():
        return None
    parent = json_text.read_object(file, "restore it").get("workdir", "")
    return _resolved(runtime.path(str(file), str(parent)))


def _resolved(path: epath.Path) -> str:
    return str(path.resolve())
