"""Chooses ranks by the share of energy that they keep, or under a cache budget.

Each layer gets its own rank. If keys and values are both factored, the budget is split between them
instead: all layers get the same two ranks, so that they share one compiled program.
"""

import collections
from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.attention.grouped import GroupedConfig
from kvjax.convert import converted, factors, layer as layer_lib
from kvjax.convert.methods import Method, ThinKeys
from kvjax.convert.model import LazyModel
from kvjax.costs import formulas
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig
from kvjax.model.layer_kinds import LayerKind


class RankChoices(NamedTuple):
    """The ranks that a layer may have, ascending, and its cache bytes per token at each."""

    ranks: list[int]
    bytes: list[int]
    dtype: str = "bfloat16"  # dtype of the cache


def rank_choices(
    config: TransformerConfig, method: Method, multiple: int, dtype: jnp.dtype
) -> list[RankChoices]:
    """Returns the candidate ranks of each layer: multiples of `multiple`, and the largest rank.

    Ranks that enlarge the cache are left out; raises a UserError if even the smallest does.
    """
    choices = []
    for mechanism, kind in config.layers:
        largest = method.max_rank(mechanism)
        smallest = dataclasses.replace(method, rank=min(multiple, largest))
        source_bytes = check_smaller(mechanism, kind, smallest, dtype, "multiple")
        ranks = [*range(multiple, largest, multiple), largest]
        sizes = [_bytes(mechanism, kind, method, rank, dtype) for rank in ranks]
        choices.append(
            RankChoices(
                ranks=[
                    rank for rank, size in zip(ranks, sizes, strict=True) if size <= source_bytes
                ],
                bytes=[size for size in sizes if size <= source_bytes],
                dtype=dtype.name,
            )
        )
    return choices


def check_smaller(
    mechanism: GroupedConfig, kind: LayerKind, method: Method, dtype: jnp.dtype, key: str
) -> int:
    """Returns a layer's cache bytes per token before conversion.

    Raises a UserError if the method would increase them.

    Args:
      key: option that sets the method's rank, for messages.
    """
    source_bytes = formulas.entry_bytes(mechanism.entry(), dtype)
    new_bytes = _bytes(mechanism, kind, method, method.rank, dtype)
    if new_bytes <= source_bytes:
        return source_bytes
    sizes = [_bytes(mechanism, kind, method, rank, dtype) for rank in range(1, method.rank)]
    fitting = [rank for rank, size in enumerate(sizes, 1) if size <= source_bytes]
    advice = f"give at most {fitting[-1]}" if fitting else "no rank makes this cache smaller"
    raise UserError(
        f"{key} = {method.rank}: takes {new_bytes:,} bytes per token and layer in {dtype.name}, "
        f"and the source {source_bytes:,}: {advice}"
    )


def check_budget(layers: Sequence[RankChoices], budget: int) -> None:
    """Raises a UserError if the smallest ranks exceed the budget."""
    used = sum(layer.bytes[0] for layer in layers)
    if used > budget:
        least = ", ".join(map(str, sorted({layer.ranks[0] for layer in layers})))
        raise UserError(
            f"--cache: rank {least} in every layer takes {used:,} bytes per token in "
            f"{layers[0].dtype}, more than the {budget:,} allowed: give a larger --cache, or a "
            "smaller --multiple"
        )


def energy_losses(
    model: LazyModel,
    method: Method,
    moments: Sequence[np.ndarray] | None,
    layers: Sequence[RankChoices],
) -> list[list[float]]:
    """Returns, per layer, the share of its energy that is lost at each candidate rank."""
    losses = []
    with progress.waiting("looking for ranks") as doing:
        for i, choice in enumerate(layers):
            doing.at(f"{i} of {len(layers)} layers")
            layer, moment_EE = converted.read_layer(model, i, moments)
            with factors.few_threads(len(moment_EE)):
                losses.append(method.energy_losses(layer, moment_EE, choice.ranks))
    return losses


def ranks_by_energy(
    layers: Sequence[RankChoices], lost: Sequence[Sequence[float]], energy: float
) -> list[int]:
    """Returns each layer's smallest rank that keeps the share `energy`, else its largest rank."""
    chosen = []
    for layer, losses in zip(layers, lost, strict=True):
        pairs = zip(layer.ranks, losses, strict=True)
        enough = [rank for rank, loss in pairs if 1 - loss >= energy - 1e-12]
        chosen.append(enough[0] if enough else layer.ranks[-1])
    return chosen


def ranks_within_budget(
    layers: Sequence[RankChoices], lost: Sequence[Sequence[float]], budget: int
) -> list[int]:
    """Returns the ranks that lose the least energy in total, within cache bytes per token.

    Repeatedly raises the rank of the layer that gains most energy per byte. This is optimal if
    gains diminish with rank, as they do for thin keys.

    Raises:
      UserError: see `check_budget`.
    """
    check_budget(layers, budget)
    indices, used = [0] * len(layers), sum(layer.bytes[0] for layer in layers)
    while True:
        best, gain = None, 0.0
        for i, (layer, losses, index) in enumerate(zip(layers, lost, indices, strict=True)):
            if index + 1 == len(layer.ranks):
                continue
            cost = layer.bytes[index + 1] - layer.bytes[index]
            kept = losses[index] - losses[index + 1]
            if used + cost <= budget and kept > gain * cost:
                best, gain = (i, cost), kept / cost
        if best is None:
            return [layer.ranks[index] for layer, index in zip(layers, indices, strict=True)]
        i, cost = best
        indices[i], used = indices[i] + 1, used + cost


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
    """Returns a method for keys and values with the two ranks that change outputs least.

    Minimises the squared errors of attention's outputs, summed over layers and in units of the
    values' energy: for values their lost share of energy, for keys the variance of logit errors
    times the layer's sensitivity (`calibration.sensitivities`). Without sensitivities, minimises
    the sum of both lost shares.

    Args:
      sensitivities: None for the objectives "weights" and "inputs".
      multiple: candidate ranks are its multiples and the largest rank.
      budget: bytes per token over all layers.

    Raises:
      UserError: see `check_budget`.
    """
    config = model.transformer
    keys, values = method.alone("key"), method.alone("value")
    ranks = {part: _ranks(config, part, multiple) for part in (keys, values)}
    smallest = dataclasses.replace(method, rank=ranks[keys][0], value_rank=ranks[values][0])
    smallest_bytes = (_bytes(*layer, smallest, smallest.rank, dtype) for layer in config.layers)
    check_budget(
        [RankChoices([smallest.rank], [size], dtype.name) for size in smallest_bytes], budget
    )
    lost = {part: np.zeros(len(ranks[part])) for part in (keys, values)}
    with progress.waiting("choosing ranks") as doing:
        for i in range(len(config.mechanisms)):
            doing.at(f"{i} of {len(config.mechanisms)} layers")
            layer, moment_EE = converted.read_layer(model, i, moments)
            with factors.few_threads(len(moment_EE)):
                unit = 1.0
                if sensitivities is not None:
                    unit = sensitivities[i] * layer_lib.logit_variance(layer, moment_EE)
                lost[keys] += unit * np.array(keys.energy_losses(layer, moment_EE, ranks[keys]))
                lost[values] += values.energy_losses(layer, moment_EE, ranks[values])
    best, count = None, collections.Counter(config.layers)
    for key_rank, key_loss in zip(ranks[keys], lost[keys], strict=True):
        for value_rank, value_loss in zip(ranks[values], lost[values], strict=True):
            candidate = dataclasses.replace(method, rank=key_rank, value_rank=value_rank)
            sizes = (n * _bytes(*layer, candidate, key_rank, dtype) for layer, n in count.items())
            used = sum(sizes)
            if used <= budget and (best is None or key_loss + value_loss < best[0]):
                best = key_loss + value_loss, candidate
    chosen = best[1]
    if chosen.value_rank == ranks[values][-1] and chosen.rank < ranks[keys][-1]:
        # Full-rank values cost the same bytes as values that are not factored.
        return dataclasses.replace(keys, rank=chosen.rank)
    return chosen


def _ranks(config: TransformerConfig, method: Method, multiple: int) -> list[int]:
    """Returns the largest rank that all layers allow, after the multiples below it."""
    most = min(method.max_rank(mechanism) for mechanism in config.mechanisms)
    return [*range(multiple, most, multiple), most]


def _bytes(
    mechanism: GroupedConfig, kind: LayerKind, method: Method, rank: int, dtype: jnp.dtype
) -> int:
    """Returns the cache bytes per token of one layer at a rank."""
    changed = dataclasses.replace(method, rank=rank)
    new = changed.mechanism(mechanism, rope=kind.rope_base)
    return formulas.entry_bytes(new.entry(), dtype)
