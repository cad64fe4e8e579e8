"""Summarises logit spectra, and judges the gap between weights and logits that the paper claims."""

from collections.abc import Iterator, Mapping
import dataclasses

import numpy as np

from kvjax.analysis.reports.logits import measurements
from kvjax.analysis.reports.logits.tables import PUBLISHED_RANKS

MATRICES = (measurements.LOGITS, measurements.CAUSAL_LOGITS, measurements.LOGITS_WITHOUT_ROPE)
# Logit spectra, table 2: M's components for 90 % of the energy over E's, "5 to 25 times".
PUBLISHED = tuple(of_m[1] / of_e[1] for _, of_m, of_e in PUBLISHED_RANKS.values())
LEAST, MOST = min(PUBLISHED), max(PUBLISHED)


@dataclasses.dataclass(frozen=True)
class Gap:
    """Ratio of components for 90 % of the energy: weights M without RoPE over logits E.

    Attributes:
      of_m, of_e: components of M and E: medians over heads (and texts).
      of_e_low, of_e_high: quartiles of the components of E.
      between_texts: the standard deviation of the texts' medians of E.
      ratio: the median of M over the median of E.
      low, median, high: quartiles of the ratios of single heads and texts.
      heads_within: share of heads and texts whose ratio is in the published range.
    """

    matrix: str
    tokens: int
    of_m: float
    of_e: float
    of_e_low: float
    of_e_high: float
    between_texts: float | None
    ratio: float
    low: float
    median: float
    high: float
    heads_within: float

    @property
    def verdict(self) -> str:
        """The ratio is below ("fewer"), in ("holds") or above ("more") the paper's range."""
        if self.ratio < LEAST:
            return "fewer"
        return "holds" if self.ratio <= MOST else "more"


class Spectra:
    """Reads the JSON of a model's logits report (its `tables.data`)."""

    def __init__(self, data: Mapping):
        self.data, self.model = data, data["model"]
        self.lengths: list[int] = data["lengths"]
        self.channels: int = data["channels"]

    def ranks(self, matrix: str, tokens: int = 0) -> np.ndarray:
        """Returns components for 90 % of the energy, [layers, texts, N]."""
        name = f"{matrix}, {tokens} tokens" if tokens else matrix
        return np.array(self.data["components_of_heads"][name]["90%"], np.float64)

    def has(self, matrix: str) -> bool:
        return any(row["matrix"] == matrix for row in self.data["spectra"])

    def gaps(self) -> Iterator[Gap]:
        """Yields the gap of each E at each length."""
        of_m = self.ranks(measurements.WEIGHTS)
        for matrix in filter(self.has, MATRICES):
            for tokens in self.lengths:
                of_e = self.ranks(matrix, tokens)
                ratio = of_m / np.maximum(of_e, 1)
                low, median, high = np.quantile(ratio, (0.25, 0.5, 0.75)).tolist()
                e_low, e_median, e_high = np.quantile(of_e, (0.25, 0.5, 0.75)).tolist()
                by_text = np.median(of_e, axis=(0, 2))
                yield Gap(
                    matrix=matrix,
                    tokens=tokens,
                    of_m=float(np.median(of_m)),
                    of_e=e_median,
                    of_e_low=e_low,
                    of_e_high=e_high,
                    between_texts=float(np.std(by_text)) if len(by_text) > 1 else None,
                    ratio=float(np.median(of_m) / max(e_median, 1)),
                    low=low,
                    median=median,
                    high=high,
                    heads_within=float(((ratio >= LEAST) & (ratio <= MOST)).mean()),
                )

    def times(self, first: tuple[str, int], second: tuple[str, int]) -> list[float]:
        """Returns quartiles over heads and texts of the ratio of components, first over second."""
        ratio = self.ranks(*first) / np.maximum(self.ranks(*second), 1)
        return np.quantile(ratio, (0.25, 0.5, 0.75)).tolist()

    def growth(self) -> dict[str, list[float]]:
        """Returns, by matrix, quartiles of components at the longest over the shortest length."""
        ends = self.lengths[-1], self.lengths[0]
        return {
            matrix: self.times((matrix, ends[0]), (matrix, ends[1]))
            for matrix in filter(self.has, MATRICES)
        }

    def causality(self) -> dict[int, list[float]]:
        """Returns, by length, quartiles of components of the causal E over those of the full E."""
        if not self.has(measurements.CAUSAL_LOGITS):
            return {}
        return {
            n: self.times((measurements.CAUSAL_LOGITS, n), (measurements.LOGITS, n))
            for n in self.lengths
        }

    def rope(self) -> dict[int, list[float]]:
        """Returns, by length, quartiles of components of E over those of E without RoPE."""
        if not self.has(measurements.LOGITS_WITHOUT_ROPE):
            return {}
        return {
            n: self.times((measurements.LOGITS, n), (measurements.LOGITS_WITHOUT_ROPE, n))
            for n in self.lengths
        }

    def weights(self) -> list[dict]:
        """Returns components of M with and without RoPE, and their spread over heads."""
        return [
            dict(matrix=row["matrix"], tokens=row["tokens"]) | row["components"]["90%"]
            for row in self.data["spectra"]
            if row["matrix"] not in MATRICES
        ]

    def as_json(self) -> dict:
        """Returns everything but the numbers of single heads."""
        keys = ("model", "channels", "num_heads", "texts", "lengths")
        return {name: self.data[name] for name in keys} | dict(
            weights=self.weights(),
            gaps=[dataclasses.asdict(gap) | dict(verdict=gap.verdict) for gap in self.gaps()],
            published_ratio=dict(least=LEAST, most=MOST),
            growth_with_length=self.growth(),
            causal_over_all_keys=self.causality(),
            with_rope_over_without=self.rope(),
            spectra=[
                {name: x for name, x in row.items() if name != "cumulative"}
                for row in self.data["spectra"]
            ],
            attention=self.data["attention"],
            geometry=self.data["geometry"],
            perplexity=self.data["perplexity"],
        )
