"""Who reaches another's final loss with fewer tokens, asked in two ways.

LRKV's figure 3 looks for the step at which one run passes another's final loss ("fewer steps"). At
that step the first run is in the middle of its schedule, while the second has just decayed its
learning rate, so the answer is too small. `at_equal_horizon` compares runs that have all ended:
the first config's final losses at several lengths say how long a run would have to be.
"""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from kvjax.compare.groups import Group
from kvjax.compare.runs import Run
from kvjax.foundation.intervals import Estimate, estimate


@dataclasses.dataclass(frozen=True)
class Saving:
    """What one group saves against another.

    Attributes:
      tokens: that the one behind was trained on.
      within_a_run: the share of tokens that the leader needs less, figure 3's way; None where it
        never gets there with one of its seeds.
      at_equal_horizon: the same from runs that have ended; None where the leader's config has no
        runs of two lengths that enclose the other's loss.
    """

    leader: str
    behind: str
    tokens: int
    within_a_run: Estimate | None
    at_equal_horizon: Estimate | None


def savings(groups: Sequence[Group], reference: Group) -> list[Saving]:
    """What the leader of each group and the reference saves, both having ended equally long."""
    if reference.final is None:
        return []
    families: dict[str, list[Group]] = {}
    for group in groups:
        families.setdefault(group.family, []).append(group)
    found = []
    for group in groups:
        alike = group.tokens == reference.tokens and group is not reference
        if not alike or group.final is None:
            continue
        leads = group.final.mean < reference.final.mean
        leader, behind = (group, reference) if leads else (reference, group)
        within = within_a_run(leader, behind)
        equal = at_equal_horizon(families[leader.family], behind)
        found.append(Saving(leader.name, behind.name, behind.tokens, within, equal))
    return found


def within_a_run(leader: Group, behind: Group) -> Estimate | None:
    """LRKV figure 3: 1 less the tokens at which the leader passes the other's end, seed by seed.

    None where it never does with some seed: a mean of the others would speak for them alone.
    """
    shares = [
        _share(leader.runs[seed], final, int(behind.tokens))
        for seed, final in behind.finals.items()
        if seed in leader.finals
    ]
    return estimate(shares) if shares and None not in shares else None


def _share(run: Run, target: float, tokens: int) -> float | None:
    """The share of `tokens` that is left when a run reaches a loss; None if it never does."""
    there = np.flatnonzero(run.bpb <= target)
    if not len(there):
        return None
    i = int(there[0])
    if i == 0:  # nothing is known before the first evaluation
        return float(1 - run.tokens[0] / tokens)
    high, low = run.bpb[i - 1], run.bpb[i]
    step = run.tokens[i] - run.tokens[i - 1]
    reached = run.tokens[i - 1] + step * (high - target) / (high - low)
    return float(1 - reached / tokens)


def at_equal_horizon(family: Sequence[Group], behind: Group) -> Estimate | None:
    """The same from final losses alone, linear in the logarithm of the tokens between them.

    Args:
      family: groups of the leader's config, of several lengths.
    """
    shares = []
    for seed, target in behind.finals.items():
        ended = [(g.tokens, g.finals[seed]) for g in family if seed in g.finals]
        if len(ended) > 1:
            shares.append(_between(sorted(ended), target, behind.tokens))
    return estimate(shares) if shares and None not in shares else None


def _between(ended: Sequence[tuple[int, float]], target: float, tokens: int) -> float | None:
    """From (tokens, final loss), tokens ascending."""
    for (few, high), (many, low) in itertools.pairwise(ended):
        if low <= target <= high and low < high:
            part = (high - target) / (high - low)
            return float(1 - np.exp(np.log(few) + part * np.log(many / few)) / tokens)
    return None
