"""Numbers of the report on compression, as figures and tables show them."""

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from kvjax.analysis.measures import key_drift, subspace_methods
from kvjax.analysis.measures.spread import Spread, spread
from kvjax.analysis.measures.subspace_methods import Method
from kvjax.analysis.reports.compression.measurements import CompressionMeasurements
from kvjax.analysis.request import Request

_SURE = 1.96  # standard errors of a 95 % interval
SMALL = 0.05  # relative increase of perplexity that counts as little


@dataclasses.dataclass(frozen=True)
class Times:
    """Perplexity relative to another one, over all texts.

    Attributes:
      low, high: 95 % interval that treats tokens as independent.
    """

    times: float
    low: float
    high: float

    def is_over(self, more: float) -> bool | None:
        """True above 1 + more, False below; None if the interval contains the limit."""
        line = 1 + more
        return None if self.low <= line < self.high else self.low > line

    @property
    def percent(self) -> str:
        """The relative change with its 95 % interval: "+1.9 % (+1.2 to +2.6)"."""
        more, low, high = (100 * (x - 1) for x in (self.times, self.low, self.high))
        return f"{more:+.1f} % ({low:+.1f} to {high:+.1f})"


@dataclasses.dataclass(frozen=True)
class Drift:
    """Errors of later logits by the number of tokens a subspace is computed on.

    Attributes:
      fixed: from text that is not measured; None without such text.
    """

    first: list[Spread]
    spread: list[Spread]
    whole: Spread
    fixed: Spread | None


class Results:
    """Results of one model."""

    def __init__(self, name: str, request: Request, measured: CompressionMeasurements):
        self.name, self.texts, self.measured = name, tuple(request.texts), measured
        shares = measured.shares
        self.half = min(range(len(shares)), key=lambda i: abs(shares[i] - 0.5))

    def ways(self) -> list[Method]:
        """Returns the methods, before RoPE first, in the order of `subspace_methods.NAMES`."""
        where = (subspace_methods.BEFORE, subspace_methods.AFTER, subspace_methods.ANYWHERE)

        def order(way):
            return (where.index(way[1]), subspace_methods.NAMES.index(way[0]))

        return sorted(self.measured.errors, key=order)

    def places(self) -> list[str]:
        return list(dict.fromkeys(where for _, where in self.ways()))

    @property
    def at_weights(self) -> str:
        """The place where weights' subspaces apply: before RoPE."""
        return self.places()[0]

    @property
    def num_heads(self) -> int:
        return next(iter(self.measured.errors.values())).shape[1]

    @property
    def num_queries(self) -> int:
        """Number of queries per row that errors are measured on."""
        length = self.measured.length
        return len(range(*key_drift.later_queries(length).indices(length)))

    def determined(self, way: Method) -> list[int]:
        """Returns the indices of ranks that a method's tokens determine."""
        errors = self.measured.errors[way]
        return [i for i in range(errors.shape[2]) if not np.isnan(errors[:, :, i]).any()]

    def error(self, way: Method, i: int) -> dict[str, Spread]:
        """Returns the spread of logit and output errors at the i-th rank."""
        found_BNA = self._by_text(self.measured.errors[way][:, :, i])
        return {name: spread(found_BNA[None, ..., j]) for j, name in enumerate(("logit", "output"))}

    def runs(self, way: Method) -> list[int]:
        """Returns the indices of ranks that the whole model ran with."""
        shares = self.measured.shares
        return [i for i in range(len(shares)) if (way, shares[i]) in self.measured.nats]

    def times(self, way: Method, i: int, over: Method | None = None) -> Times | None:
        """Returns perplexity at the i-th rank over the model's or another method's.

        None if the model did not run with it.
        """
        share = self.measured.shares[i]
        nats_BT = self.measured.nats.get((way, share))
        base_BT = self.measured.nats.get(over and (over, share))
        if nats_BT is None or base_BT is None:
            return None
        more_BT = nats_BT.astype(np.float64) - base_BT
        error = more_BT.std() / math.sqrt(more_BT.size)
        middle = more_BT.mean()
        return Times(*map(math.exp, (middle, middle - _SURE * error, middle + _SURE * error)))

    def is_flat(self, matrix: str) -> bool:
        """Returns True if 90 % of the energy takes more than half of the possible components."""
        return self.spectrum(matrix).median > self.possible(matrix) / 2

    def perplexity(self, name: tuple[Method, float] | None) -> tuple[float, dict[str, float]]:
        """Returns perplexity over all texts, and per text."""
        nats_BT = self.measured.nats[name].astype(np.float64)
        of_texts = self._by_text(nats_BT).mean(axis=1)
        each = dict(zip(self.texts, np.exp(of_texts).tolist(), strict=True))
        return math.exp(nats_BT.mean()), each

    def rows(self) -> Iterator[dict]:
        """Yields every method at every rank that its tokens determine."""
        for way in self.ways():
            for i in self.determined(way):
                yield dict(
                    way=way[0],
                    where=way[1],
                    rank=self.measured.ranks[i],
                    share=self.measured.shares[i],
                    **{name: dataclasses.asdict(x) for name, x in self.error(way, i).items()},
                    perplexity=self._run(way, i),
                )

    def _run(self, way: Method, i: int) -> dict | None:
        times = self.times(way, i)
        if times is None:
            return None
        perplexity, by_text = self.perplexity((way, self.measured.shares[i]))
        return dict(**dataclasses.asdict(times), perplexity=perplexity, by_text=by_text)

    def spectrum(self, name: str) -> Spread | None:
        """Returns components for 90 % of the energy, over heads and texts."""
        found_BN2 = self.measured.spectra.get(name)
        if found_BN2 is None:
            return None
        found = spread(found_BN2[None, ..., 0])
        return found if len(found_BN2) > 1 else dataclasses.replace(found, between_texts=None)

    def possible(self, name: str) -> int:
        """Returns the largest rank of a matrix, for weights given their mechanism."""
        return int(self.measured.spectra[name][..., 1].max())

    def channels(self, name: str) -> int:
        return int(self.measured.spectra[name][..., 2].max())

    def overlaps(self, where: str) -> tuple[list[Spread], list[Spread]]:
        """Returns overlaps with the subspace of all tokens: of first ones, and of spread ones."""
        first, even = np.moveaxis(self.measured.overlap[where], (3, 2), (0, 1))
        return [spread(one[None]) for one in first], [spread(one[None]) for one in even]

    def drifts(self, where: str) -> list[Spread]:
        """Returns the excess of the spread tokens' overlap over the first tokens', by number of
        tokens.
        """
        gap_BKT = np.diff(self.measured.overlap[where], axis=3)[..., 0]
        return [spread(gap_BK[None]) for gap_BK in np.moveaxis(gap_BKT, 2, 0)]

    def later(self, where: str) -> Drift:
        """Returns errors of later logits."""
        found_XBN = np.moveaxis(self.measured.drift_error[where], 2, 0)
        count = len(self.measured.drift_at)
        *each, whole = [spread(one[None]) for one in found_XBN[:-1]]
        fixed = None if np.isnan(found_XBN[-1]).any() else spread(found_XBN[-1:])
        return Drift(each[:count], each[count:], whole, fixed)

    def _by_text(self, x_BN: np.ndarray) -> np.ndarray:
        """Returns [texts, ...], with a text's rows concatenated."""
        return x_BN.reshape(len(self.texts), -1, *x_BN.shape[2:])
