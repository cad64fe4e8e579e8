"""Ranks by the share of energy they keep, or under a budget of the cache.

They differ by layer; where keys and values are both of low rank the budget is split between them
instead, and all layers have the same two ranks: their caches stay alike, and one program computes
them all.
"""

import collections
from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.convert import converted, factors, layer as layer_lib
from kvjax.convert.methods import Method, ThinKeys
from kvjax.convert.model import LazyModel
from kvjax.costs import formulas
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig


class RankChoices(NamedTuple):
    """The ranks that a layer may have, ascending, and its cache's bytes per token at each."""

    ranks: list[int]
    bytes: list[int]


def rank_choices(
    config: TransformerConfig, method: Method, multiple: int, dtype: jnp.dtype
) -> list[RankChoices]:
    """The ranks to choose from in each layer: multiples of a number, and the largest rank.

    Ranks that make its cache larger are left out; a UserError if even the least rank does.
    """
    found = []
    for mechanism in config.mechanisms:
        most = method.max_rank(mechanism)
        least = dataclasses.replace(method, rank=min(multiple, most))
        before = check_smaller(config, mechanism, least, dtype, "multiple")
        ranks = [*range(multiple, most, multiple), most]
        sizes = [_bytes(config, mechanism, method, rank, dtype) for rank in ranks]
        there = [(rank, size) for rank, size in zip(ranks, sizes, strict=True) if size <= before]
        found.append(RankChoices(*map(list, zip(*there, strict=True))))
    return found


def check_smaller(
    config: TransformerConfig, mechanism, method: Method, dtype: jnp.dtype, key: str
) -> int:
    """The bytes per token of a layer as it is; a UserError if a method makes its cache larger.

    Args:
      key: that gave the method's rank.
    """

    def of(rank):
        return _bytes(config, mechanism, method, rank, dtype)

    before, after = formulas.entry_bytes(mechanism.entry(), dtype), of(method.rank)
    if after <= before:
        return before
    fitting = [rank for rank in range(1, method.rank) if of(rank) <= before]
    larger = f"takes {after:,} bytes per token in a layer, and the source {before:,}"
    if fitting:
        raise UserError(f"{key} = {method.rank}: {larger}: give at most {fitting[-1]}")
    raise UserError(
        f"{key} = {method.rank}: {larger}: no rank makes this cache smaller, which has "
        f"{mechanism.num_kv_heads} KV heads"
    )


def check_budget(layers: Sequence[RankChoices], budget: int) -> None:
    """Raises a UserError if the least that can be is more than the budget."""
    used = sum(layer.bytes[0] for layer in layers)
    if used > budget:
        least = ", ".join(map(str, sorted({layer.ranks[0] for layer in layers})))
        raise UserError(
            f"--cache: a rank of {least} in every layer takes {used:,} bytes per token, more than "
            f"the {budget:,} allowed: give more, or a smaller --multiple"
        )


def energy_losses(
    model: LazyModel,
    method: Method,
    moments: Sequence[np.ndarray] | None,
    layers: Sequence[RankChoices],
) -> list[list[float]]:
    """The share of a layer's energy that is lost at each of its choices, a list for each layer.

    Args:
      moments: see `converted.ConvertedModel`.
    """
    found = []
    with progress.waiting("looking for ranks") as doing:
        for i, choice in enumerate(layers):
            doing.at(f"{i} of {len(layers)} layers")
            layer, moment_EE = converted.read_layer(model, i, moments)
            with factors.few_threads(len(moment_EE)):
                found.append(method.energy_losses(layer, moment_EE, choice.ranks))
    return found


def ranks_by_energy(
    layers: Sequence[RankChoices], lost: Sequence[Sequence[float]], energy: float
) -> list[int]:
    """The least rank of every layer that keeps a share of its energy; else its largest."""

    def enough(lost):
        return 1 - lost >= energy - 1e-12

    return [
        next((rank for rank, lost in zip(layer.ranks, of, strict=True) if enough(lost)), None)
        or layer.ranks[-1]
        for layer, of in zip(layers, lost, strict=True)
    ]


def ranks_within_budget(
    layers: Sequence[RankChoices], lost: Sequence[Sequence[float]], budget: int
) -> list[int]:
    """The ranks that lose the least energy in all with caches of at most so many bytes.

    Greedily, by the energy that a layer's next step keeps for a byte: where steps keep less and
    less, as those of thin keys do, no other choice keeps more.

    Raises:
      UserError: see `check_least`.
    """
    check_budget(layers, budget)
    at, used = [0] * len(layers), sum(layer.bytes[0] for layer in layers)
    while True:
        best, gain = None, 0.0
        for i, (layer, of, now) in enumerate(zip(layers, lost, at, strict=True)):
            if now + 1 == len(layer.ranks):
                continue
            cost = layer.bytes[now + 1] - layer.bytes[now]
            kept = of[now] - of[now + 1]
            if used + cost <= budget and kept > gain * cost:
                best, gain = (i, cost), kept / cost
        if best is None:
            return [layer.ranks[now] for layer, now in zip(layers, at, strict=True)]
        i, cost = best
        at[i], used = at[i] + 1, used + cost


def split_budget(
    model: LazyModel,
    method: ThinKeys,
    moments: Sequence[np.ndarray] | None,
    sensitivities: Sequence[float] | None,
    *,
    multiple: int,
    budget: int,
    dtype: jnp.dtype,
) -> ThinKeys:
    """Returns a method for keys and values with the two ranks that cost outputs least.

    Summed over layers is the share of the values' energy that is lost, and of keys the variance of
    logits' errors times the layer's sensitivity: both are squared errors of outputs, in one unit
    (`calibration.sensitivities`). Where that is not measured, the shares of energies are summed.

    Args:
      sensitivities: None: of the objectives "weights" and "inputs".
      multiple: of which ranks are; the largest rank may be none.
      budget: bytes per token, of all layers.

    Raises:
      UserError: see `check_least`.
    """
    config = model.transformer
    keys, values = method.alone("key"), method.alone("value")
    ranks = {part: _ranks(config, part, multiple) for part in (keys, values)}
    least = dataclasses.replace(method, rank=ranks[keys][0], value_rank=ranks[values][0])
    of_least = (_bytes(config, m, least, least.rank, dtype) for m in config.mechanisms)
    check_budget([RankChoices([least.rank], [size]) for size in of_least], budget)
    lost = {part: np.zeros(len(ranks[part])) for part in (keys, values)}
    with progress.waiting("looking for ranks") as doing:
        for i in range(len(config.mechanisms)):
            doing.at(f"{i} of {len(config.mechanisms)} layers")
            layer, moment_EE = converted.read_layer(model, i, moments)
            with factors.few_threads(len(moment_EE)):
                unit = 1.0
                if sensitivities is not None:
                    unit = sensitivities[i] * layer_lib.logit_variance(layer, moment_EE)
                lost[keys] += unit * np.array(keys.energy_losses(layer, moment_EE, ranks[keys]))
                lost[values] += values.energy_losses(layer, moment_EE, ranks[values])
    best, count = None, collections.Counter(config.mechanisms)
    for key_rank, of_keys in zip(ranks[keys], lost[keys], strict=True):
        for value_rank, of_values in zip(ranks[values], lost[values], strict=True):
            found = dataclasses.replace(method, rank=key_rank, value_rank=value_rank)
            used = sum(n * _bytes(config, m, found, key_rank, dtype) for m, n in count.items())
            if used <= budget and (best is None or of_keys + of_values < best[0]):
                best = of_keys + of_values, found
    found = best[1]
    if found.value_rank == ranks[values][-1] and found.rank < ranks[keys][-1]:
        return dataclasses.replace(keys, rank=found.rank)  # values as they are take as much
    return found


def _ranks(config: TransformerConfig, method: Method, multiple: int) -> list[int]:
    """Multiples of a number, and the largest rank of all layers."""
    most = min(method.max_rank(mechanism) for mechanism in config.mechanisms)
    return [*range(multiple, most, multiple), most]


def _bytes(
    config: TransformerConfig, mechanism, method: Method, rank: int, dtype: jnp.dtype
) -> int:
    """Per token, of a layer's cache at a rank."""
    rope = config.block.positions == "rope"
    new = dataclasses.replace(method, rank=rank).mechanism(mechanism, rope=rope)
    return formulas.entry_bytes(new.entry(), dtype)
