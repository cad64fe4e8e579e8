"""Computes the numbers that the report on behaviour shows."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from kvjax.analysis.reports.behaviour.measurements import Behaviour, BehaviourMeasurements
from kvjax.foundation import json_text

# Roles of heads: (statistic, True if the heads with its largest values have the role, False if
# those with its smallest).
ROLES = {
    "token before": ("previous_N", True),
    "first token": ("first_N", True),
    "nearest": ("distance_N", False),
    "broadest": ("entropy_N", True),
    "by the text": ("content_N", True),
    "induction": ("induction_N", True),
}
DISTANCES = ("divergence_NN", "without_first_NN", "outputs_NN")
_FEWEST = 3  # fewest pairs for a rank correlation
_DIGITS = 6  # decimals of numbers in `data`


@dataclasses.dataclass(frozen=True)
class Head:
    """A head that the report shows by itself.

    Attributes:
      role: a key of `ROLES`; "" for a head that the user requested.
    """

    role: str
    layer: int
    head: int

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"

    @property
    def title(self) -> str:
        return f"{self.role}: {self.name}" if self.role else f"head {self.name}"


@dataclasses.dataclass(frozen=True)
class Relation:
    """Rank correlations over the pairs of each layer, and their quartiles over layers."""

    by_layer: tuple[float | None, ...]
    low: float
    median: float
    high: float


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Quartiles of a distance between heads of one layer, over the pairs of all layers."""

    count: int
    low: float
    median: float
    high: float


class Results:
    """Results of one model.

    Args:
      name: the model's name.
      heads: (layer, head) pairs that the user requested.
    """

    def __init__(
        self, name: str, measured: BehaviourMeasurements, heads: Sequence[tuple[int, int]] = ()
    ):
        self.name, self.measured = name, measured
        self._requested = [Head("", layer, head) for layer, head in heads]

    @property
    def num_layers(self) -> int:
        return len(self.measured.layers)

    @property
    def has_pairs(self) -> bool:
        """True if some layer has at least two heads."""
        return any(layer.num_heads > 1 for layer in self.measured.layers)

    @property
    def shares_some(self) -> bool:
        """True if a layer has both pairs that share a KV head and pairs that do not."""
        return any(1 < layer.num_kv_heads < layer.num_heads for layer in self.measured.layers)

    def quartiles(self, statistic: str) -> np.ndarray:
        """Returns [3, L] quartiles over each layer's heads."""
        return _quartiles(self.measured.statistic(statistic))

    def of_pairs(self, distance: str, shared: bool | None = None) -> np.ndarray:
        """Returns [3, L] quartiles of a distance over each layer's pairs; nan without pairs."""
        return _quartiles(
            [layer.pairs(getattr(layer, distance), shared) for layer in self.measured.layers]
        )

    def pairs(self, distance: str, shared: bool | None = None) -> Pairs | None:
        """Returns the quartiles of a distance over the pairs of all layers."""
        distances = np.concatenate(
            [layer.pairs(getattr(layer, distance), shared) for layer in self.measured.layers]
        )
        distances = distances[np.isfinite(distances)]
        if not distances.size:
            return None
        low, median, high = np.quantile(distances, (0.25, 0.5, 0.75)).tolist()
        return Pairs(len(distances), low, median, high)

    def relation(self, distance: str) -> Relation | None:
        """Returns Spearman's correlation over pairs of heads, of weight similarity with a distance.

        Returns None if no layer has three pairs with different values.
        """
        by_layer = [
            _rank_correlation(layer.pairs(layer.weights_NN), layer.pairs(getattr(layer, distance)))
            if layer.weights_NN is not None
            else None
            for layer in self.measured.layers
        ]
        known = [value for value in by_layer if value is not None]
        if not known:
            return None
        low, median, high = np.quantile(known, (0.25, 0.5, 0.75)).tolist()
        return Relation(tuple(by_layer), low, median, high)

    def by_head(self, statistic: str) -> np.ndarray:
        """Returns [L, N] values of a statistic, padded with nan where a layer has fewer heads."""
        by_layer = self.measured.statistic(statistic)
        most = max(map(len, by_layer))
        return np.stack(
            [np.pad(x_N, (0, most - len(x_N)), constant_values=np.nan) for x_N in by_layer]
        )

    def count(self, statistic: str, above: float) -> int:
        """Returns the number of heads whose statistic is above a value."""
        return int(sum((x_N > above).sum() for x_N in self.measured.statistic(statistic)))

    def chosen(self, each: int = 1) -> list[Head]:
        """Returns the `each` strongest heads of every role. A head is chosen for one role only."""
        heads, used = [], set()
        for role, (statistic, largest) in ROLES.items():
            by_layer = self.measured.statistic(statistic)
            ranked = [
                (-value if largest else value, i, head)
                for i, x_N in enumerate(by_layer)
                for head, value in enumerate(x_N)
                if np.isfinite(value) and (i, head) not in used
            ]
            for _, i, head in sorted(ranked)[:each]:
                used.add((i, head))
                heads.append(Head(role, i, head))
        return heads

    def shown(self) -> list[Head]:
        """Returns the heads to show as maps: the requested ones, or the strongest of each role."""
        return self._requested or self.chosen()

    def behaviour(self, head: Head) -> Behaviour:
        return self.measured.layers[head.layer]

    def statistics(self, head: Head) -> dict[str, float]:
        """Returns one head's statistics by name."""
        return {
            name: float(x_N[head.head]) for name, x_N in self.behaviour(head).statistics.items()
        }

    def map(self, head: Head) -> np.ndarray:
        """Returns a head's [T, T] pattern on the first tokens, with nan for masked keys.

        The tokens are repeated ones if the head's role is induction, else those of the first text.
        """
        layer = self.behaviour(head)
        maps_NTT = layer.repeated_NTT if head.role == "induction" else layer.text_NTT
        p_TT = maps_NTT[head.head].astype(np.float64)
        visible_TT = layer.mask.visible(len(p_TT))
        return np.where(visible_TT, p_TT, np.nan)

    def data(self) -> dict:
        """Returns every number, by layer and head, JSON-able."""
        m = self.measured

        def rounded(x, digits=_DIGITS):
            return np.round(np.asarray(x, np.float64), digits)

        layers = [
            dict(
                num_kv_heads=layer.num_kv_heads,
                heads={name.removesuffix("_N"): rounded(x) for name, x in layer.statistics.items()},
                **{name.removesuffix("_NN"): rounded(getattr(layer, name)) for name in DISTANCES},
                weights=None if layer.weights_NN is None else rounded(layer.weights_NN),
            )
            for layer in m.layers
        ]
        kinds = dict(all=None, same_kv_head=True, other_kv_head=False)
        pairs, relations = {}, {}
        for distance in DISTANCES:
            name = distance.removesuffix("_NN")
            relations[name] = self.relation(distance)
            pairs[name] = {kind: self.pairs(distance, shared) for kind, shared in kinds.items()}
        maps = [
            dict(role=head.role, head=head.name, map=rounded(self.map(head), 4))
            for head in self.shown()
        ]
        return json_text.plain(
            dict(
                tokens=m.length,
                sequences=m.sequences,
                block=m.block,
                induction_by_chance=m.induction_by_chance,
                layers=layers,
                pairs=pairs,
                weights_and_behaviour=relations,
                maps=maps,
                cka_between_layers=dict(inputs=rounded(m.inputs_LL), outputs=rounded(m.outputs_LL)),
            )
        )


def _rank_correlation(x_P: np.ndarray, y_P: np.ndarray) -> float | None:
    """Returns Spearman's correlation; None for fewer than three pairs or constant values."""
    from scipy import stats  # takes a second to import

    known = np.isfinite(x_P) & np.isfinite(y_P)
    x_P, y_P = x_P[known], y_P[known]
    if len(x_P) < _FEWEST or np.ptp(x_P) == 0 or np.ptp(y_P) == 0:
        return None
    return float(stats.spearmanr(x_P, y_P).statistic)


def _quartiles(by_layer: list[np.ndarray]) -> np.ndarray:
    none = np.full(3, np.nan)
    finite = (x[np.isfinite(x)] for x in by_layer)
    return np.stack([np.quantile(x, (0.25, 0.5, 0.75)) if x.size else none for x in finite], axis=1)
