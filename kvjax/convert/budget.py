"""Ranks that differ by layer: by the share of energy they keep, or under a budget of the cache."""

from collections.abc import Sequence

import numpy as np

from kvjax.convert import factors
from kvjax.convert import layer as layer_lib
from kvjax.convert import model as model_lib
from kvjax.convert.methods import Method
from kvjax.convert.model import Model
from kvjax.costs import formulas
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig


def spectra(model: Model, method: Method, moments: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """For each layer, the share of its energy that each rank adds: [most ranks], descending."""
    found = []
    rope = model.transformer.block.positions == "rope"
    with progress.waiting("looking for ranks") as doing:
        for i, mechanism in enumerate(model.transformer.mechanisms):
            doing.at(f"{i} of {len(model.transformer.mechanisms)} layers")
            weights = model_lib.read_layer(model, i)["attention"]
            layer = layer_lib.read(weights, mechanism, rope=rope)
            moment_EE = layer.inner() if moments is None else np.asarray(moments[i], np.float64)
            with factors.few_threads(len(moment_EE)):
                found.append(method.spectrum(layer, moment_EE))
    return found


def by_energy(shares: Sequence[np.ndarray], energy: float, multiple: int) -> list[int]:
    """The least rank of every layer that keeps a share of its energy, in multiples.

    Args:
      shares: see `spectra`; what no rank adds is kept by all of them.
    """
    ranks = []
    for share in shares:
        kept = 1 - share.sum() + np.cumsum(share)
        needed = int(np.searchsorted(kept, energy - 1e-12)) + 1
        ranks.append(min(-(-needed // multiple) * multiple, len(share)))
    return ranks


def within(
    shares: Sequence[np.ndarray], bytes_of: Sequence[Sequence[int]], budget: int, multiple: int
) -> list[int]:
    """Ranks, in multiples, that lose the least energy in all with caches of at most so many bytes.

    Greedily, by the energy that a layer's next step keeps for a byte: spectra descend, so that no
    other choice of steps keeps more.

    Args:
      bytes_of: of each layer, the bytes per token at ranks 0, 1, 2, ...

    Raises:
      UserError: the least that can be is more than the budget.
    """
    ranks = [min(multiple, len(share)) for share in shares]
    used = sum(each[rank] for each, rank in zip(bytes_of, ranks, strict=True))
    if used > budget:
        raise UserError(
            f"a rank of {multiple} in every layer takes {used:,} bytes per token, more than the "
            f"{budget:,} allowed: allow more of the cache, or smaller ranks"
        )
    while True:
        best, gain = None, 0.0
        for i, (share, rank) in enumerate(zip(shares, ranks, strict=True)):
            after = min(rank + multiple, len(share))
            cost = bytes_of[i][after] - bytes_of[i][rank]
            if after == rank or used + cost > budget:
                continue
            if share[rank:after].sum() / cost > gain:
                best, gain = (i, after, cost), share[rank:after].sum() / cost
        if best is None:
            return ranks
        i, after, cost = best
        ranks[i], used = after, used + cost


def bytes_by_rank(config: TransformerConfig, by_rank: Sequence[Method], dtype) -> list[list[int]]:
    """Of each layer, the bytes per token that its cache takes with each of these methods."""
    rope = config.block.positions == "rope"
    return [
        [
            formulas.entry_bytes(method.mechanism(mechanism, rope=rope).entry(), dtype)
            for method in by_rank
        ]
        for mechanism in config.mechanisms
    ]
