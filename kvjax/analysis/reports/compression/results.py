"""Computes the numbers that the report on compression shows."""

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from kvjax.analysis.measures import key_drift, subspace_methods
from kvjax.analysis.measures.spread import Spread, spread
from kvjax.analysis.measures.subspace_methods import Method
from kvjax.analysis.reports.compression.measurements import CompressionMeasurements
from kvjax.analysis.request import Request

_Z = 1.96  # half a 95 % interval, in standard errors
SMALL = 0.05  # a relative increase of perplexity up to this counts as small


@dataclasses.dataclass(frozen=True)
class PerplexityRatio:
    """The ratio of two perplexities over all texts.

    Attributes:
      low, high: 95 % interval, if tokens were independent.
    """

    times: float
    low: float
    high: float

    def is_over(self, more: float) -> bool | None:
        """True if the interval is above 1 + more, False if below, None if it contains 1 + more."""
        line = 1 + more
        return None if self.low <= line < self.high else self.low > line

    @property
    def percent(self) -> str:
        """The relative change with its 95 % interval: "+1.9 % (+1.2 to +2.6)"."""
        more, low, high = (100 * (x - 1) for x in (self.times, self.low, self.high))
        return f"{more:+.1f} % ({low:+.1f} to {high:+.1f})"


@dataclasses.dataclass(frozen=True)
class Drift:
    """Errors of later logits with keys cut to a subspace.

    Attributes:
      first, spread: subspaces of the first tokens, and of spread tokens, by number of tokens.
      whole: the subspace of all tokens.
      fixed: the fixed subspace; None if there is no text to compute it from.
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
        # Index of the rank nearest to half of the channels.
        self.half_rank = min(range(len(shares)), key=lambda i: abs(shares[i] - 0.5))

    def methods(self) -> list[Method]:
        """Returns the methods, before RoPE first, in the order of `subspace_methods.NAMES`."""
        where = (subspace_methods.BEFORE, subspace_methods.AFTER, subspace_methods.ANYWHERE)

        def order(method):
            return (where.index(method[1]), subspace_methods.NAMES.index(method[0]))

        return sorted(self.measured.errors, key=order)

    def places(self) -> list[str]:
        return list(dict.fromkeys(where for _, where in self.methods()))

    @property
    def at_weights(self) -> str:
        """The place where keys are cut to subspaces from weights: before RoPE, if there is RoPE."""
        return self.places()[0]

    @property
    def num_heads(self) -> int:
        return next(iter(self.measured.errors.values())).shape[1]

    @property
    def num_queries(self) -> int:
        """The number of queries per row that errors are measured on."""
        length = self.measured.length
        return len(range(*key_drift.later_queries(length).indices(length)))

    def determined_ranks(self, method: Method) -> list[int]:
        """Returns the indices of ranks that a method's tokens determine."""
        errors = self.measured.errors[method]
        return [i for i in range(errors.shape[2]) if not np.isnan(errors[:, :, i]).any()]

    def error(self, method: Method, i: int) -> dict[str, Spread]:
        """Returns the spreads of logit and output errors at the i-th rank."""
        errors_BNA = self._by_text(self.measured.errors[method][:, :, i])
        return {
            name: spread(errors_BNA[None, ..., j]) for j, name in enumerate(("logit", "output"))
        }

    def ranks_run(self, method: Method) -> list[int]:
        """Returns the indices of ranks that the whole model ran with."""
        shares = self.measured.shares
        return [i for i in range(len(shares)) if (method, shares[i]) in self.measured.nats]

    def relative_perplexity(
        self, method: Method, i: int, over: Method | None = None
    ) -> PerplexityRatio | None:
        """Returns perplexity at the i-th rank, over the unmodified model's or another method's.

        Returns None if the model did not run with a method at that rank.
        """
        share = self.measured.shares[i]
        nats_BT = self.measured.nats.get((method, share))
        base_BT = self.measured.nats.get(over and (over, share))
        if nats_BT is None or base_BT is None:
            return None
        excess_BT = nats_BT.astype(np.float64) - base_BT
        error = excess_BT.std() / math.sqrt(excess_BT.size)
        mean = excess_BT.mean()
        return PerplexityRatio(*map(math.exp, (mean, mean - _Z * error, mean + _Z * error)))

    def is_flat(self, matrix: str) -> bool:
        """Returns True if 90 % of the energy takes more than half of the possible components."""
        return self.spectrum(matrix).median > self.possible(matrix) / 2

    def perplexity(self, name: tuple[Method, float] | None) -> tuple[float, dict[str, float]]:
        """Returns the perplexity of a run over all texts, and by text."""
        nats_BT = self.measured.nats[name].astype(np.float64)
        text_nats = self._by_text(nats_BT).mean(axis=1)
        by_text = dict(zip(self.texts, np.exp(text_nats).tolist(), strict=True))
        return math.exp(nats_BT.mean()), by_text

    def rows(self) -> Iterator[dict]:
        """Yields the numbers of every method at every rank that its tokens determine."""
        for method in self.methods():
            for i in self.determined_ranks(method):
                yield dict(
                    way=method[0],
                    where=method[1],
                    rank=self.measured.ranks[i],
                    share=self.measured.shares[i],
                    **self.error(method, i),
                    perplexity=self._run(method, i),
                )

    def _run(self, method: Method, i: int) -> dict | None:
        times = self.relative_perplexity(method, i)
        if times is None:
            return None
        perplexity, by_text = self.perplexity((method, self.measured.shares[i]))
        return dict(**dataclasses.asdict(times), perplexity=perplexity, by_text=by_text)

    def spectrum(self, name: str) -> Spread | None:
        """Returns a matrix's components for 90 % of the energy, over heads and texts."""
        ranks_BN3 = self.measured.spectra.get(name)
        if ranks_BN3 is None:
            return None
        components = spread(ranks_BN3[None, ..., 0])
        return (
            components
            if len(ranks_BN3) > 1
            else dataclasses.replace(components, between_texts=None)
        )

    def possible(self, name: str) -> int:
        """Returns the largest possible rank of a matrix, which factored weights may limit."""
        return int(self.measured.spectra[name][..., 1].max())

    def channels(self, name: str) -> int:
        return int(self.measured.spectra[name][..., 2].max())

    def overlaps(self, where: str) -> tuple[list[Spread], list[Spread]]:
        """Returns overlaps of the first and of the spread tokens' subspaces with the whole's."""
        first, even = np.moveaxis(self.measured.overlap[where], (3, 2), (0, 1))
        return [spread(overlap_BK[None]) for overlap_BK in first], [
            spread(overlap_BK[None]) for overlap_BK in even
        ]

    def drifts(self, where: str) -> list[Spread]:
        """Returns by number of tokens the overlap of spread tokens minus that of first tokens."""
        gap_BKT = np.diff(self.measured.overlap[where], axis=3)[..., 0]
        return [spread(gap_BK[None]) for gap_BK in np.moveaxis(gap_BKT, 2, 0)]

    def later(self, where: str) -> Drift:
        """Returns the errors of later logits at a place."""
        errors_XBN = np.moveaxis(self.measured.drift_error[where], 2, 0)
        count = len(self.measured.drift_at)
        *spreads, whole = [spread(errors_BN[None]) for errors_BN in errors_XBN[:-1]]
        fixed = None if np.isnan(errors_XBN[-1]).any() else spread(errors_XBN[-1:])
        return Drift(spreads[:count], spreads[count:], whole, fixed)

    def _by_text(self, x_BN: np.ndarray) -> np.ndarray:
        """Returns [texts, ...], with a text's rows concatenated."""
        return x_BN.reshape(len(self.texts), -1, *x_BN.shape[2:])
