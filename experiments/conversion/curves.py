"""Measures perplexity before tuning: a curve over ranks for each conversion method.

A point of a curve has a rank, in the unit of the tables, and conversion methods that are applied
one after another. A total rank of all heads is divided by their number and rounded down, as in thin
keys' Table 5.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
import statistics
from typing import NamedTuple

from experiments.conversion import records
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert.methods import LowRankKV, Method, ThinKeys
from kvjax.foundation import progress

Methods = tuple[Method, ...]  # applied one after another; (): the original model
OBJECTIVES = {  # by part; for queries, "outputs" would equal "inputs"
    "key": ("weights", "inputs", "outputs"),
    "query": ("weights", "inputs"),
    "both": ("weights", "inputs"),
    "value": ("weights", "inputs", "outputs"),
}
LRKV_OBJECTIVES = ("weights", "outputs")


class Curve(NamedTuple):
    """Methods by rank."""

    name: str
    about: dict  # keys of the record, JSON-able
    methods: Mapping[int, Methods]


class Measured(NamedTuple):
    """A converted model's mechanisms, errors and perplexity."""

    mechanisms: Sequence[MechanismConfig]
    errors: Sequence[Mapping[str, float]]  # by layer, see `methods.ConvertedLayer`
    perplexity: float


def thin_keys(
    ranks: Sequence[int], part: str, mode: str, objective: str, *, heads: int = 1
) -> Curve:
    """Returns the curve of thin keys.

    Args:
      heads: the divisor of a rank in mode "per_head": the number of heads, or 1 if ranks are per
        head.
    """
    share = heads if mode == "per_head" else 1
    keys = dict(mode=mode, part=part, objective=objective)
    methods = {rank: (ThinKeys(rank=rank // share, **keys),) for rank in ranks}
    return Curve(f"{part}_{mode}_{objective}", dict(method="thin_keys") | keys, methods)


def thin_keys_and_values(ranks: Sequence[int], objective: str, *, heads: int) -> Curve:
    """Returns the curve of thin keys and thin values of equal rank, with a latent for each head."""
    methods = {rank: latents_per_head(rank // heads, objective) for rank in ranks}
    about = dict(method="thin_keys", part="key_value", mode="per_head", objective=objective)
    return Curve(f"key_value_per_head_{objective}", about, methods)


def joint_keys_and_values(ranks: Sequence[int], objective: str, *, heads: int = 1) -> Curve:
    """Returns the curve of a latent of all heads' keys and one of all heads' values, of equal rank.

    Heads share a latent as they share a base in LRKV.

    Args:
      heads: number of heads if `ranks` count channels per head, else 1.
    """
    methods = {rank: (joint_latents(rank * heads, objective),) for rank in ranks}
    about = dict(method="thin_keys", mode="joint", part="key_value", objective=objective)
    return Curve(f"key_value_joint_{objective}", about, methods)


def joint_latents(rank: int, objective: str) -> ThinKeys:
    """Returns the method with one latent of all heads' keys and one of all heads' values."""
    return ThinKeys(rank=rank, mode="joint", part="key_value", objective=objective)


def latents_per_head(rank: int, objective: str) -> Methods:
    """Returns the methods for thin keys and thin values, for models without RoPE and key norm."""
    key = ThinKeys(rank=rank, objective=objective)
    return key, ThinKeys(rank=rank, part="value", objective=objective)


def lrkv(ranks: Sequence[int], objective: str, *, align: bool = True) -> Curve:
    """Returns the curve of LRKV with one base, over ranks of the residuals."""
    methods = {rank: (LowRankKV(rank=rank, objective=objective, align=align),) for rank in ranks}
    name = f"lrkv_{objective}" if align else f"lrkv_{objective}_not_aligned"
    return Curve(name, dict(method="lrkv", objective=objective, align=align), methods)


def cached(mechanisms: Sequence[MechanismConfig]) -> int:
    """Returns cached elements per token, all layers."""
    return sum(math.prod(field.shape) for m in mechanisms for field in m.entry().values())


def figures(
    curve: Curve, mechanisms: Sequence[MechanismConfig], measure: Callable[[Methods], Measured]
) -> dict:
    """Measures a curve point by point and returns its result.

    Args:
      mechanisms: the original model's.
    """
    points = []
    with progress.waiting(f"measuring {curve.name}") as doing:
        for rank, methods in curve.methods.items():
            doing.at(f"rank {rank}")
            points.append(dict(rank=rank) | point(measure(methods), mechanisms))
    return curve.about | dict(points=points)


def tasks(
    model: str,
    curves: Sequence[Curve],
    mechanisms: Sequence[MechanismConfig],
    measure: Callable[[Methods], Measured],
    *,
    shape: dict,
    settings: dict,
    seconds: float,
) -> list[records.Task]:
    """Returns the tasks that measure perplexity by rank: one for the original, and one per curve.

    Args:
      model: first part of the records' names.
      mechanisms: the original model's.
      shape: its num_heads and head_dim.
      settings: settings of the records, see `records.Task`.
      seconds: expected time of a point.
    """

    def task(name: str, make: Callable[[], dict], points: int) -> records.Task:
        return records.Task(f"{model}/before/{name}", settings, make, seconds * points)

    all_tasks = [task("original", lambda: point(measure(()), mechanisms) | shape, 1)]
    for curve in curves:
        make = functools.partial(figures, curve, mechanisms, measure)
        all_tasks.append(task(curve.name, make, len(curve.methods)))
    return all_tasks


def point(measured: Measured, mechanisms: Sequence[MechanismConfig]) -> dict:
    """Returns one point: cached elements per token, their share, perplexity, and mean errors."""
    elements = cached(measured.mechanisms)
    names = dict.fromkeys(name for errors in measured.errors for name in errors)
    lost = {name: statistics.mean(errors[name] for errors in measured.errors) for name in names}
    sizes = dict(cached=elements, share=elements / cached(mechanisms))
    return sizes | dict(perplexity=measured.perplexity, lost=lost)
