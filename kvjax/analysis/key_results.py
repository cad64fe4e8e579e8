"""What was measured of keys cut at low rank, in the numbers that figures and tables show."""

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from kvjax.analysis import key_ways
from kvjax.analysis.key_measurements import Measured
from kvjax.analysis.key_ways import Way
from kvjax.analysis.logit_results import Spread
from kvjax.analysis.logit_results import spread
from kvjax.analysis.request import Request

_SURE = 1.96  # standard errors to either side: 95 %


@dataclasses.dataclass(frozen=True)
class Times:
    """Perplexity over the model's own, of all texts together.

    Attributes:
      low, high: 95 % of tokens drawn anew, taken as if each were independent of the others.
    """

    times: float
    low: float
    high: float
    perplexity: float
    by_text: dict[str, float]


class Results:
    """What was measured, in the numbers that figures and tables show."""

    def __init__(self, name: str, request: Request, measured: Measured):
        self.name, self.texts, self.measured = name, tuple(request.texts), measured
        shares = measured.shares
        self.half = min(range(len(shares)), key=lambda i: abs(shares[i] - 0.5))

    def ways(self) -> list[Way]:
        """Before RoPE first, in the order of `key_ways.NAMES`."""
        where = (key_ways.BEFORE, key_ways.BEHIND, key_ways.ANYWHERE)
        order = lambda way: (where.index(way[1]), key_ways.NAMES.index(way[0]))
        return sorted(self.measured.errors, key=order)

    def places(self) -> list[str]:
        return list(dict.fromkeys(where for _, where in self.ways()))

    @property
    def at_weights(self) -> str:
        """Where weights' subspaces are cut: before RoPE."""
        return self.places()[0]

    @property
    def num_heads(self) -> int:
        return next(iter(self.measured.errors.values())).shape[1]

    def error(self, way: Way, i: int) -> dict[str, Spread]:
        """Of logits and outputs at the i-th rank."""
        found_BNA = self._by_text(self.measured.errors[way][:, :, i])
        return {name: spread(found_BNA[None, ..., j]) for j, name in enumerate(("logit", "output"))}

    def times(self, way: Way, i: int) -> Times | None:
        """At the i-th rank; None where the model did not run so."""
        nats_BT = self.measured.nats.get((way, self.measured.shares[i]))
        if nats_BT is None:
            return None
        more_BT = (nats_BT - self.measured.nats[None]).astype(np.float64)
        error = more_BT.std() / math.sqrt(more_BT.size)
        middle = more_BT.mean()
        ends = (middle, middle - _SURE * error, middle + _SURE * error)
        return Times(*map(math.exp, ends), *self.perplexity((way, self.measured.shares[i])))

    def perplexity(self, name: tuple[Way, float] | None) -> tuple[float, dict[str, float]]:
        """Of all texts together, and of each."""
        nats_BT = self.measured.nats[name].astype(np.float64)
        of_texts = self._by_text(nats_BT).mean(axis=1)
        each = dict(zip(self.texts, np.exp(of_texts).tolist(), strict=True))
        return math.exp(nats_BT.mean()), each

    def rows(self) -> Iterator[dict]:
        """Every way at every rank."""
        for way in self.ways():
            for i, r in enumerate(self.measured.ranks):
                times = self.times(way, i)
                yield dict(
                    way=way[0],
                    where=way[1],
                    rank=r,
                    share=self.measured.shares[i],
                    **{name: dataclasses.asdict(x) for name, x in self.error(way, i).items()},
                    perplexity=times and dataclasses.asdict(times),
                )

    def spectrum(self, name: str) -> Spread | None:
        """Components for 90 % of the energy, over heads and texts."""
        found_BN2 = self.measured.spectra.get(name)
        if found_BN2 is None:
            return None
        found = spread(found_BN2[None, ..., 0])
        return found if len(found_BN2) > 1 else dataclasses.replace(found, between_texts=None)

    def channels(self, name: str) -> int:
        return int(self.measured.spectra[name][..., 1].max())

    def overlaps(self, where: str) -> list[tuple[Spread, Spread]]:
        """By tokens: with the subspace of twice as many, and of all."""
        found = self.measured.overlap[where]
        return [
            tuple(spread(found[None, :, :, t, j]) for j in (0, 1)) for t in range(found.shape[2])
        ]

    def later(self, where: str) -> list[Spread | None]:
        """Errors of later logits, by tokens, and then of all and of the fixed subspace."""
        found = self.measured.drift_error[where]
        there = ~np.isnan(found).all(axis=(0, 1))
        return [spread(found[None, ..., t]) if there[t] else None for t in range(len(there))]

    def _by_text(self, x_BN: np.ndarray) -> np.ndarray:
        """[texts, ...]: a text's rows one behind the other."""
        return x_BN.reshape(len(self.texts), -1, *x_BN.shape[2:])
