"""Computes how many fewer tokens one model needs to reach another's final loss, in two ways.

LRKV's figure 3 takes the step at which one run passes another's final loss ("fewer steps"). At that
step the first run is in the middle of its schedule, while the second has decayed its learning rate,
so this underestimates the saving. `at_equal_horizon` uses finished runs only: it interpolates
between the final losses of the first config at several lengths.
"""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from kvjax.compare.groups import Group
from kvjax.compare.runs import ComparedRun
from kvjax.foundation.intervals import Estimate, estimate


@dataclasses.dataclass(frozen=True)
class Saving:
    """Tokens that one group saves against another.

    Attributes:
      leader, behind: names of the groups.
      tokens: training tokens of the group behind.
      within_a_run: share of tokens that the leader saves by LRKV's figure 3; None if one of its
        seeds never reaches the loss.
      at_equal_horizon: the same share, computed from finished runs; None if the leader's config has
        no finished runs of two lengths whose losses enclose the other's.
    """

    leader: str
    behind: str
    tokens: int
    within_a_run: Estimate | None
    at_equal_horizon: Estimate | None


def savings(groups: Sequence[Group], reference: Group) -> list[Saving]:
    """Returns the saving between the reference and each finished group of the same length.

    The one with the lower final loss is the leader.
    """
    if reference.final is None:
        return []
    families: dict[str, list[Group]] = {}
    for group in groups:
        families.setdefault(group.family, []).append(group)
    result = []
    for group in groups:
        if group is reference or group.tokens != reference.tokens or group.final is None:
            continue
        leads = group.final.mean < reference.final.mean
        leader, behind = (group, reference) if leads else (reference, group)
        within = within_a_run(leader, behind)
        equal = at_equal_horizon(families[leader.family], behind)
        result.append(Saving(leader.name, behind.name, behind.tokens, within, equal))
    return result


def within_a_run(leader: Group, behind: Group) -> Estimate | None:
    """Returns the share of tokens left when the leader passes the other's final loss (figure 3).

    Returns None if a seed never passes it: the mean over the other seeds would be biased.
    """
    shares = [
        _share(leader.runs[seed], final, int(behind.tokens))
        for seed, final in behind.finals.items()
        if seed in leader.finals
    ]
    return estimate(shares) if shares and None not in shares else None


def _share(run: ComparedRun, target: float, tokens: int) -> float | None:
    """Returns the share of `tokens` left when a run reaches a loss; None if it never does."""
    reached_at = np.flatnonzero(run.bpb <= target)
    if not len(reached_at):
        return None
    i = int(reached_at[0])
    if i == 0:  # no interpolation before the first evaluation
        return float(1 - run.tokens[0] / tokens)
    high, low = run.bpb[i - 1], run.bpb[i]
    between = run.tokens[i] - run.tokens[i - 1]
    tokens_needed = run.tokens[i - 1] + between * (high - target) / (high - low)
    return float(1 - tokens_needed / tokens)


def at_equal_horizon(family: Sequence[Group], behind: Group) -> Estimate | None:
    """Returns the share of tokens saved, from final losses that are interpolated in log tokens.

    Args:
      family: groups of the leader's config that differ in length.
    """
    shares = []
    for seed, target in behind.finals.items():
        ended = [(g.tokens, g.finals[seed]) for g in family if seed in g.finals]
        if len(ended) > 1:
            shares.append(_between(sorted(ended), target, behind.tokens))
    return estimate(shares) if shares and None not in shares else None


def _between(ended: Sequence[tuple[int, float]], target: float, tokens: int) -> float | None:
    """Returns the share of `tokens` saved at a target loss; None if no two losses enclose it.

    Args:
      ended: (tokens, final loss) of finished runs, ascending in tokens.
    """
    for (few, high), (many, low) in itertools.pairwise(ended):
        if low <= target <= high and low < high:
            fraction = (high - target) / (high - low)
            return float(1 - np.exp(np.log(few) + fraction * np.log(many / few)) / tokens)
    return None
