"""Chooses the method of every layer: ranks under a budget, sizes of MLA, or the best method."""

import argparse
from collections.abc import Iterator, Sequence
import copy
import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.convert import (
    budget,
    calibration,
    converted,
    factors,
    options as options_lib,
    perplexity,
    refit,
)
from kvjax.convert.budget import RankChoices
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.latent_method import LatentAttention
from kvjax.convert.methods import Method, ThinKeys
from kvjax.convert.model import LazyModel
from kvjax.convert.pooled_heads import PooledHeads
from kvjax.costs import formulas
from kvjax.data import config as config_lib
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError, warn
from kvjax.model.config import LATENT_CHANNELS

DTYPE = jnp.dtype(jnp.bfloat16)  # the cache's, in budgets and reported sizes
_COMPARED_TOKENS = 8192  # calibration tokens whose perplexity decides between methods
_EVERY, _FEW_SWEEPS = 4, 4  # MLA's sizes are compared by short fits of every fourth layer
# Weight of keys' errors in that comparison, lower than in the final fit. For a quarter of
# SmolLM2-135M's cache, weight 10 selects a latent of 32 and a RoPE key of 64 channels, with 2.9
# times the perplexity; weight 3 selects 64 and 32, with 2.0 times (rows of 512 tokens).
_SIZE_KEY_WEIGHT = 3.0


class Choice(NamedTuple):
    """The method of every layer.

    Attributes:
      compared: with "auto", title and perplexity of each method.
    """

    methods: list[Method]
    compared: tuple[tuple[str, float], ...] = ()


def cache_bytes(model: LazyModel) -> int:
    """Returns the cache bytes per token over all layers."""
    return formulas.cache_bytes_per_token(model.transformer, DTYPE)


def check(options: argparse.Namespace, source: LazyModel) -> None:
    """Raises a UserError if the method does not apply to the model or exceeds --cache.

    Reads no text.
    """
    if options.method == "auto":
        refusals = _refusals(options, source)
        if len(refusals) == len(options_lib.FITTED):
            reasons = "; ".join(f"{name}: {error}" for name, error in refusals.items())
            raise UserError(f"--method=auto: no method applies: {reasons}")
        return
    method, config = _make_method(options, source), source.transformer
    if isinstance(method, LatentAttention):
        if options.rank is None:
            method = next(_latent_sizes(options, source, method))
        elif options.rank > (most := _most_channels(source)):
            raise UserError(
                f"--rank={options.rank}: must be at most {most}: the model's width, or "
                f"{LATENT_CHANNELS} if that is more"
            )
    if isinstance(method, PooledHeads) and options.rank is None:
        method = _pooled(options, source)
    ConvertedModel(source, [method] * config.block.num_layers, None)
    if options.rank is not None:
        for mechanism, kind in config.layers:
            budget.check_smaller(mechanism, kind, method, DTYPE, "rank")
    elif not isinstance(method, (LatentAttention, PooledHeads)):
        _rank_choices(options, method, source)


def _refusals(options, source: LazyModel) -> dict[str, UserError]:
    """Returns why methods that "auto" compares do not apply, by name."""
    refusals = {}
    for name in options_lib.FITTED:
        try:
            check(_with_method(options, name), source)
        except UserError as error:
            refusals[name] = error
    return refusals


def _with_method(options: argparse.Namespace, name: str) -> argparse.Namespace:
    own = copy.copy(options)
    own.method = name
    options_lib.fill_method(own)
    return own


def choose(
    options: argparse.Namespace,
    source: LazyModel,
    moments: Sequence[np.ndarray] | None,
    rows_BT: np.ndarray | None,
    long_BT: np.ndarray | None,
) -> Choice:
    """Returns the method of every layer.

    Args:
      moments: see `calibration.moments`; None for the objective "weights".
      rows_BT: calibration text; None for the objective "weights".
      long_BT: the same text in rows as long as later contexts; for "mla" and "auto".
    """
    if options.method == "auto":
        return _best(options, source, moments, rows_BT, long_BT)
    return Choice(_by_layer(options, source, moments, rows_BT, long_BT))


def _best(options, source: LazyModel, moments, rows_BT: np.ndarray, long_BT: np.ndarray) -> Choice:
    """Returns the methods with the least perplexity on a part of the calibration text."""
    texts = config_lib.split_source(options.calibrate)  # whose rows alternate
    compared_BT = long_BT[: max(len(texts), _COMPARED_TOKENS // (long_BT.shape[1] - 1))]
    regressing_BT = rows_BT[:, :-1] if options.refit else None

    best, lowest, compared, refusals = None, np.inf, [], _refusals(options, source)
    for name in options_lib.FITTED:
        try:
            if name in refusals:
                raise refusals[name]
            own = _with_method(options, name)
            methods = _by_layer(own, source, moments, rows_BT, long_BT)
            model = refit.converted_model(source, methods, moments, regressing_BT)
            measured = perplexity.perplexity(model, compared_BT)
        except UserError as error:
            warn(f"--method={name} is left out: {error}")
            continue
        titles = dict.fromkeys(method.title for method in methods)
        more = ", ..." if len(titles) > 1 else ""  # ranks by layer
        compared.append((f"{name}: {methods[0].title}{more}", measured))
        if measured < lowest:
            best, lowest = methods, measured
    if best is None:
        raise UserError(f"--cache={options.cache}: no method makes the cache this small")
    return Choice(best, tuple(compared))


def _by_layer(options, source: LazyModel, moments, rows_BT, long_BT) -> list[Method]:
    """Returns the method of every layer, with its sizes within --cache if no rank is given."""
    method, count = _make_method(options, source), source.transformer.block.num_layers
    if isinstance(method, LatentAttention):
        statistics = calibration.attention_statistics(source, long_BT[:, :-1], moments)
        if options.rank is None:
            sizes = list(_latent_sizes(options, source, method))
            method = _least_error(sizes, source, moments, statistics)
        return [dataclasses.replace(method, statistics=of_layer) for of_layer in statistics]
    if isinstance(method, PooledHeads) and options.rank is None:
        return [_pooled(options, source)] * count
    if options_lib.splits_budget(options):
        return [_split(options, method, source, moments, rows_BT)] * count
    if options.rank is not None:
        return [method] * count
    ranks = _ranks(options, method, source, moments)
    return [dataclasses.replace(method, rank=rank) for rank in ranks]


def _make_method(options: argparse.Namespace, source: LazyModel) -> Method:
    """Returns the method; where only some layers have RoPE, no layer's keys are absorbed.

    Absorbed keys would have fewer channels than the keys of layers with RoPE.
    """
    method = options_lib.make_method(options)
    rotates = {kind.rope_base is not None for _, kind in source.transformer.layers}
    if isinstance(method, ThinKeys) and len(rotates) > 1:
        return dataclasses.replace(method, absorb=False)
    return method


def _pooled(options, source: LazyModel) -> PooledHeads:
    """Returns the method with the most KV heads that --cache allows."""
    heads = source.transformer.mechanisms[0].num_kv_heads
    for rank in range(heads, 0, -1):
        if heads % rank == 0 and rank / heads <= options.cache:
            return PooledHeads(rank)
    raise UserError(
        f"--cache={options.cache}: one KV head of {heads} is {1 / heads:.3f} of the cache: give "
        "a larger --cache"
    )


# -- sizes of MLA ----------------------------------------------------------------------------------


def _latent_sizes(options, source: LazyModel, method: LatentAttention) -> Iterator[LatentAttention]:
    """Yields MLA with RoPE keys as wide as a head's key, half and a quarter of it.

    Each has the largest latent that --cache allows.

    Raises:
      UserError: --cache allows none of them.
    """
    if method.rope_dim % 2:
        raise UserError(f"--rope_dim={method.rope_dim}: must be even")
    mechanism = source.transformer.mechanisms[0]
    most = min(method.max_rank(mechanism), _most_channels(source))
    element_bytes = DTYPE.itemsize * len(source.transformer.mechanisms)
    elements, head_dim = _allowed(options, source) // element_bytes, mechanism.key_dim
    widths = [method.rope_dim] if method.rope_dim else [head_dim, head_dim // 2, head_dim // 4]
    found = 0
    for width in widths:
        rank = min(elements - width, most)
        step = math.lcm(options.multiple, 2)  # a latent's channels are even
        rank -= rank % step if rank >= step else rank % 2
        if rank >= 2 and width % 2 == 0:
            found += 1
            yield dataclasses.replace(method, rope_dim=width, rank=rank)
    if not found:
        raise UserError(
            f"--cache={options.cache}: leaves {elements} elements per token and layer, fewer than "
            f"a RoPE key of {widths[-1]} channels and a latent of 2: give a larger --cache"
        )


def _most_channels(source: LazyModel) -> int:
    """Returns the most channels of a latent: it needs no more than its input has."""
    return max(source.transformer.block.d_model, LATENT_CHANNELS)


def _least_error(sizes, source: LazyModel, moments, statistics) -> LatentAttention:
    """Returns the sizes with the least error over every fourth layer."""
    if len(sizes) == 1:
        return sizes[0]
    errors = np.zeros(len(sizes))
    with progress.waiting("choosing sizes") as doing:
        for i in range(0, len(statistics), _EVERY):
            doing.at(f"{i} of {len(statistics)} layers")
            layer, moment_EE = converted.read_layer(source, i, moments)
            with factors.few_threads(len(moment_EE)):
                for j, size in enumerate(sizes):
                    quick = dict(statistics=statistics[i], sweeps=_FEW_SWEEPS)
                    fit = dataclasses.replace(size, **quick).fit(layer, moment_EE)
                    key_error, value_error = fit.squared_errors
                    errors[j] += _SIZE_KEY_WEIGHT / size.key_weight * key_error + value_error
    return sizes[int(np.argmin(errors))]


# -- ranks of the other methods --------------------------------------------------------------------


def _allowed(options: argparse.Namespace, source: LazyModel) -> int:
    """Returns the bytes per token that --cache allows."""
    return int(options.cache * cache_bytes(source) + 1e-6)  # 0.7 * 10 rounds to below 7


def _rank_choices(options, method: Method, source: LazyModel) -> list[RankChoices]:
    """Returns each layer's candidate ranks.

    Raises:
      UserError: the cache would be larger than the source's, or than --cache.
    """
    layers = budget.rank_choices(source.transformer, method, options.multiple, DTYPE)
    if options.cache is not None:
        budget.check_budget(layers, _allowed(options, source))
    return layers


def _ranks(options, method: Method, source: LazyModel, moments) -> list[int]:
    """Returns each layer's rank."""
    layers = _rank_choices(options, method, source)
    lost = budget.energy_losses(source, method, moments, layers)
    if options.energy is not None:
        ranks = budget.ranks_by_energy(layers, lost, options.energy)
        _warn_of_shortfall(layers, lost, ranks, options.energy)
        return ranks
    return budget.ranks_within_budget(layers, lost, _allowed(options, source))


def _split(
    options, method: ThinKeys, source: LazyModel, moments, rows_BT: np.ndarray | None
) -> ThinKeys:
    """Returns the method with --cache split into ranks of keys and values, equal in all layers."""
    sensitivities = None
    if method.objective == "outputs":
        sensitivities = calibration.sensitivities(source, rows_BT[:, :-1])
    return budget.split_budget(
        source,
        method,
        moments,
        sensitivities,
        multiple=options.multiple,
        budget=_allowed(options, source),
        dtype=DTYPE,
    )


def _warn_of_shortfall(
    layers: list[RankChoices], lost: list[list[float]], ranks: list[int], energy: float
) -> None:
    """Warns of layers that keep less than --energy at every rank that shrinks the cache."""
    shortfalls = []
    for i, (layer, losses, rank) in enumerate(zip(layers, lost, ranks, strict=True)):
        kept = 1 - losses[layer.ranks.index(rank)]
        if kept < energy - 1e-9:
            shortfalls.append(f"layer {i} keeps {kept:.4f} at rank {rank}")
    if shortfalls:
        more = f" and {len(shortfalls) - 4} more" if len(shortfalls) > 4 else ""
        warn(
            f"--energy={energy}: no rank that makes the cache smaller keeps this share: "
            f"{', '.join(shortfalls[:4])}{more}"
        )
