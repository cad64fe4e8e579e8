"""Groups runs that differ only in their seed, as one curve with a band."""

from collections.abc import Sequence
import dataclasses
import functools
import json

import numpy as np

from kvjax.compare import runs as runs_lib
from kvjax.compare.runs import ComparedRun, SkippedRun
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate, estimate, over_seeds

WAYS = ("seed", "none")


@dataclasses.dataclass(frozen=True)
class Curve:
    """Bits per byte by step: means over seeds, half widths of 95 % intervals (0 for one seed)."""

    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    bpb: np.ndarray
    half: np.ndarray


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one config with different seeds.

    Attributes:
      name: name of the config. If several configs have that name, the keys that differ are added.
      runs: the runs by seed.
    """

    name: str
    runs: dict[int, ComparedRun]

    @property
    def one(self) -> ComparedRun:
        """An arbitrary run, for common properties."""
        return next(iter(self.runs.values()))

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs.values())

    @functools.cached_property
    def ended(self) -> list[ComparedRun]:
        """The runs that the group's numbers come from: the finished ones, or all if none is."""
        return [run for run in self.runs.values() if run.finished] or list(self.runs.values())

    @property
    def tokens(self) -> int:
        """Training tokens until the last evaluation, the minimum over `ended`."""
        return int(min(run.tokens[-1] for run in self.ended))

    @property
    def seconds(self) -> float:
        """Training seconds until the last evaluation, the mean over `ended`."""
        return float(np.mean([run.seconds[-1] for run in self.ended]))

    @functools.cached_property
    def costs(self) -> dict[str, int]:
        experiment = self.one.experiment
        return runs_lib.costs(experiment.model, experiment.data.sequence_length)

    @functools.cached_property
    def family(self) -> str:
        """A string that is equal for runs that differ only in their length or seed."""
        keys = {key: x for key, x in self.one.computation.items() if key != runs_lib.STEPS}
        return json.dumps(keys, sort_keys=True)

    @property
    def finals(self) -> dict[int, float]:
        """Final bits per byte of finished runs, by seed."""
        return {seed: run.final for seed, run in self.runs.items() if run.finished}

    @property
    def final(self) -> Estimate | None:
        return estimate(list(self.finals.values())) if self.finals else None

    @functools.cached_property
    def curve(self) -> Curve:
        """The mean curve at the steps at which all seeds were evaluated."""
        runs = list(self.runs.values())
        steps = functools.reduce(np.intersect1d, [run.steps for run in runs])
        indices = [np.searchsorted(run.steps, steps) for run in runs]
        rows = np.array([run.bpb[i] for run, i in zip(runs, indices, strict=True)])
        seconds = np.array([run.seconds[i] for run, i in zip(runs, indices, strict=True)])
        mean, half = over_seeds(rows)
        half = np.zeros(len(steps)) if half is None else half
        tokens = steps * self.one.experiment.tokens_per_step
        return Curve(steps, tokens, seconds.mean(axis=0), mean, half)


def groups(runs: Sequence[ComparedRun], way: str) -> list[Group]:
    """Groups runs, in the order of their first runs.

    Args:
      way: "seed": runs that differ only in their seed; "none": one group per run.

    Raises:
      UserError: two runs of one config and seed.
    """
    if way == "none":
        return [Group(run.name, {run.seed: run}) for run in runs]
    for name, why in repeats(runs).items():
        raise UserError(f"{name} {why}: give one of them, or --group=none")
    by_config: dict[str, dict[int, ComparedRun]] = {}
    for run in runs:
        by_config.setdefault(json.dumps(run.computation, sort_keys=True), {})[run.seed] = run
    members = [dict(sorted(by_seed.items())) for by_seed in by_config.values()]
    names = _names([next(iter(by_seed.values())) for by_seed in members])
    return [Group(name, by_seed) for name, by_seed in zip(names, members, strict=True)]


def repeats(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Returns the names of runs that repeat an earlier run's config and seed, with the reasons."""
    first: dict[tuple[str, int], ComparedRun] = {}
    reasons = {}
    for run in runs:
        earlier = first.setdefault((json.dumps(run.computation, sort_keys=True), run.seed), run)
        if earlier is not run:
            reasons[run.name] = f"has the config and the seed ({run.seed}) of {earlier.name}"
    return reasons


def _names(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns the names of groups, given one run of each; see `Group.name`."""
    by_name: dict[str, list[ComparedRun]] = {}
    for run in runs:
        by_name.setdefault(run.experiment.name, []).append(run)
    names = []
    for run in runs:
        name = run.experiment.name
        keys = sorted({key for other in by_name[name] for key in _differing(run, other)})
        values = [f"{key.partition('.')[2]}={run.keys.get(key, 'default')}" for key in keys]
        names.append(" ".join([name, *values]))
    return names


def _differing(one: ComparedRun, other: ComparedRun) -> set[str]:
    keys = one.computation.keys() | other.computation.keys()
    return {key for key in keys if one.computation.get(key) != other.computation.get(key)}


def without_curve(groups: Sequence[Group]) -> list[SkippedRun]:
    """Returns groups whose seeds were never evaluated at a common step."""
    why = "has no curve: no step was evaluated for all of its seeds"
    return [SkippedRun(g.name, why, may_come=True) for g in groups if not len(g.curve.steps)]


def missing_seeds(groups: Sequence[Group]) -> dict[str, list[int]]:
    """Returns, by group, the seeds that other groups have and the group lacks."""
    seeds = {seed for group in groups for seed in group.runs}
    lacking = {group.name: sorted(seeds - group.runs.keys()) for group in groups}
    return {name: seeds for name, seeds in lacking.items() if seeds}
