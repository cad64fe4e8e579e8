"""Runs that differ by their seed alone, as one curve with a band."""

from collections.abc import Sequence
import dataclasses
import functools
import json

import numpy as np

from kvjax.compare import runs as runs_lib
from kvjax.compare.runs import LeftOut, Run
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate, estimate, over_seeds

WAYS = ("seed", "none")


@dataclasses.dataclass(frozen=True)
class Curve:
    """Bits per byte by step: means over seeds, and half of their 95 % intervals (0: one seed)."""

    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    bpb: np.ndarray
    half: np.ndarray


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one config with different seeds.

    Attributes:
      name: of the config, with the keys that tell it from others of that name.
      runs: by seed.
    """

    name: str
    runs: dict[int, Run]

    @property
    def one(self) -> Run:
        """Any of them, for what they share."""
        return next(iter(self.runs.values()))

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs.values())

    @functools.cached_property
    def ended(self) -> list[Run]:
        """Those that its figures are of: that have ended or, while none has, all."""
        return [run for run in self.runs.values() if run.finished] or list(self.runs.values())

    @property
    def tokens(self) -> int:
        """That the shortest of `ended` was trained on up to its last evaluation."""
        return int(min(run.tokens[-1] for run in self.ended))

    @property
    def seconds(self) -> float:
        """That training took until then, the mean of `ended`."""
        return float(np.mean([run.seconds[-1] for run in self.ended]))

    @functools.cached_property
    def costs(self) -> dict[str, int]:
        experiment = self.one.experiment
        return runs_lib.costs(experiment.model, experiment.data.sequence_length)

    @functools.cached_property
    def family(self) -> str:
        """What is the same for runs of other lengths too."""
        what = {key: x for key, x in self.one.what.items() if key != runs_lib.STEPS}
        return json.dumps(what, sort_keys=True)

    @property
    def finals(self) -> dict[int, float]:
        """Bits per byte at the end, by seed, of those that have ended."""
        return {seed: run.final for seed, run in self.runs.items() if run.finished}

    @property
    def final(self) -> Estimate | None:
        return estimate(list(self.finals.values())) if self.finals else None

    @functools.cached_property
    def curve(self) -> Curve:
        """At the steps at which all of them were evaluated."""
        runs = list(self.runs.values())
        steps = functools.reduce(np.intersect1d, [run.steps for run in runs])
        at = [np.searchsorted(run.steps, steps) for run in runs]
        rows = np.array([run.bpb[i] for run, i in zip(runs, at, strict=True)])
        seconds = np.array([run.seconds[i] for run, i in zip(runs, at, strict=True)])
        mean, half = over_seeds(rows)
        half = np.zeros(len(steps)) if half is None else half
        tokens = steps * self.one.experiment.tokens_per_step
        return Curve(steps, tokens, seconds.mean(axis=0), mean, half)


def groups(runs: Sequence[Run], way: str) -> list[Group]:
    """Runs in groups, which stand in the order in which their first runs were given.

    Args:
      way: "seed": runs that differ by nothing else are one; "none": each by itself.

    Raises:
      UserError: two runs of one config and one seed.
    """
    if way == "none":
        return [Group(run.name, {run.seed: run}) for run in runs]
    for name, why in repeats(runs).items():
        raise UserError(f"{name} {why}: give one of them, or --group=none")
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(run.what, sort_keys=True), {})[run.seed] = run
    members = [dict(sorted(there.items())) for there in found.values()]
    names = _names([next(iter(there.values())) for there in members])
    return [Group(name, there) for name, there in zip(names, members, strict=True)]


def repeats(runs: Sequence[Run]) -> dict[str, str]:
    """By name the runs that are an earlier one again; why is said of the run, as "has ..."."""
    first: dict[tuple[str, int], Run] = {}
    found = {}
    for run in runs:
        before = first.setdefault((json.dumps(run.what, sort_keys=True), run.seed), run)
        if before is not run:
            found[run.name] = f"has the config and the seed ({run.seed}) of {before.name}"
    return found


def _names(runs: Sequence[Run]) -> list[str]:
    """The name of each run's config; where several have one name, with the keys that differ."""
    called: dict[str, list[Run]] = {}
    for run in runs:
        called.setdefault(run.experiment.name, []).append(run)
    found = []
    for run in runs:
        name = run.experiment.name
        alike = called[name]
        keys = sorted({key for other in alike for key in _differing(run, other)})
        more = [f"{key.partition('.')[2]}={run.keys.get(key, 'default')}" for key in keys]
        found.append(" ".join([name, *more]))
    return found


def _differing(one: Run, other: Run) -> set[str]:
    keys = one.what.keys() | other.what.keys()
    return {key for key in keys if one.what.get(key) != other.what.get(key)}


def without_curve(found: Sequence[Group]) -> list[LeftOut]:
    """Groups whose seeds were never evaluated at one step."""
    why = "has no curve: no step was evaluated with all of its seeds"
    return [LeftOut(g.name, why, may_come=True) for g in found if not len(g.curve.steps)]


def missing_seeds(found: Sequence[Group]) -> dict[str, list[int]]:
    """By group the seeds that others have and it has not."""
    every = {seed for group in found for seed in group.runs}
    lacking = {group.name: sorted(every - group.runs.keys()) for group in found}
    return {name: seeds for name, seeds in lacking.items() if seeds}
