"""Claims that nothing here can settle: larger models, other weights or data, unclear words."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools

from experiments.ledger.results import NoResultError
from experiments.ledger.verdicts import (
    CONTRADICTED,
    FAR,
    MISSING,
    PART,
    REPRODUCED,
    UNDEFINED,
    Found,
    Rule,
)
from kvjax import experiment as experiment_lib
from kvjax.costs import formulas
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.hardware import datasheets

_UTILISATION = 0.4  # of a chip's bfloat16 rate, for days of training


@dataclasses.dataclass(frozen=True)
class AtScale:
    """A claim about models larger than those trained here: not settled, but what it would take.

    Attributes:
      configs: in configs/, that would be trained, by their names.
      tokens: of each; by config, or of all alike.
      seen: what the same question finds at demo size, if it was asked; several by how.
      why: what else is to be said.
    """

    configs: Sequence[str]
    tokens: float | Sequence[float]
    seen: Rule | Mapping[str, Rule] | None = None
    why: str = ""
    chips: int = 16
    kind: str = "v5p"

    def judge(self) -> Found:
        why = f"{self.why}; " if self.why else ""
        return Found(
            FAR, _seen(self.seen, "at demo size") + why + f"would take {self.settled_by()}"
        )

    def settled_by(self) -> str:
        tokens = self.tokens
        each = list(tokens) if isinstance(tokens, Sequence) else [tokens] * len(self.configs)
        flops = sum(
            training_flops(config) * of for config, of in zip(self.configs, each, strict=True)
        )
        chip = datasheets.DEVICES[self.kind]
        hours = flops / (self.chips * chip.bf16_flops * _UTILISATION) / 3600
        shown = f"{hours / 24:,.1f} days" if hours >= 24 else f"{hours:.1f} hours"
        names = ", ".join(f"`{config}`" for config in self.configs)
        many = " and ".join(dict.fromkeys(f"{of / 1e9:g}B" for of in each))
        return (
            f"{names} of configs/, {many} tokens each: {shown} a seed "
            f"on {self.chips} {self.kind} chips at {100 * _UTILISATION:.0f} % of their FLOP/s"
        )


@functools.cache
def experiment_of(config: str) -> experiment_lib.Experiment:
    """The experiment of a config, by the config's name in configs/."""
    return experiment_lib.resolve(load_config(CONFIGS / f"{config}.py"))


@functools.cache
def training_flops(config: str) -> int:
    """FLOPs of training on one token, by a config's name in configs/."""
    experiment = experiment_of(config)
    return formulas.training_flops_per_token(experiment.model, experiment.data.sequence_length)


# What is seen elsewhere settles nothing, so it is not said in the words of verdicts.
_AS = {REPRODUCED: "as claimed", CONTRADICTED: "not as claimed", PART: "in part as claimed"}


def _seen(seen: Rule | Mapping[str, Rule] | None, where: str) -> str:
    """What the same question finds in what could be trained here."""
    if seen is None:
        return ""
    rules = seen if isinstance(seen, Mapping) else {"": seen}
    said = []
    for how, rule in rules.items():
        try:
            found = rule.judge()
        except NoResultError:
            found = Found(MISSING, "")
        told = _AS.get(found.verdict, found.verdict) + (f", {found.ours}" if found.ours else "")
        said.append(f"{how}: {told}" if how else told)
    return f"{where} {'; '.join(said)}; "


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A claim about models or data that are not at hand: not settled.

    Attributes:
      seen: what the same question finds `where`, if it was asked.
    """

    needs: str
    seen: Rule | Mapping[str, Rule] | None = None
    where: str = ""

    def judge(self) -> Found:
        return Found(FAR, _seen(self.seen, self.where) + f"needs {self.needs}")


@dataclasses.dataclass(frozen=True)
class Undefined:
    """What the text leaves open; `seen` says what a result tells of it, where there is one."""

    why: str
    seen: Callable[[], str] = lambda: ""

    def judge(self) -> Found:
        try:
            seen = self.seen()
        except NoResultError:
            seen = ""
        return Found(UNDEFINED, "; ".join(filter(None, (self.why, seen))))
