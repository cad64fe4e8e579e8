"""What is measured before tuning: for each way to convert, one curve over ranks.

A point is a rank as the tables show it, and the methods that are applied in turn. Channels of a
rank that is split over heads are rounded down, as in thin keys' Table 5.
"""

from collections.abc import Callable, Mapping, Sequence
import math
import statistics
from typing import NamedTuple

from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert.methods import LowRankKV, Method, ThinKeys
from kvjax.foundation import progress

Methods = tuple[Method, ...]  # applied in turn; (): the original
OF_PART = dict(  # objectives that differ: queries have no output of their own
    key=("weights", "inputs", "outputs"),
    query=("weights", "inputs"),
    both=("weights", "inputs"),
    value=("weights", "inputs", "outputs"),
)
LRKV_OBJECTIVES = ("weights", "outputs")


class Curve(NamedTuple):
    """Methods by rank."""

    name: str
    about: dict  # JSON-able: what tables look for
    methods: Mapping[int, Methods]


class Measured(NamedTuple):
    """What a model is after its conversion."""

    mechanisms: Sequence[MechanismConfig]
    errors: Sequence[Mapping[str, float]]  # by layer, see `methods.ConvertedLayer`
    perplexity: float


def thin_keys(
    ranks: Sequence[int], part: str, mode: str, objective: str, *, heads: int = 1
) -> Curve:
    """Thin keys over ranks, which all heads have together.

    Args:
      heads: that share a rank in mode "per_head"; 1: each has it.
    """
    of_head = lambda rank: rank // heads if mode == "per_head" else rank
    keys = dict(mode=mode, part=part, objective=objective)
    methods = {rank: (ThinKeys(rank=of_head(rank), **keys),) for rank in ranks}
    return Curve(f"{part}_{mode}_{objective}", dict(method="thin_keys") | keys, methods)


def thin_keys_and_values(ranks: Sequence[int], objective: str, *, heads: int) -> Curve:
    """Keys and then values, of one rank."""
    methods = {rank: keys_and_values(rank // heads, objective) for rank in ranks}
    about = dict(method="thin_keys", part="key_value", mode="per_head", objective=objective)
    return Curve(f"key_value_per_head_{objective}", about, methods)


def joint_keys_and_values(ranks: Sequence[int], objective: str, *, heads: int = 1) -> Curve:
    """A latent of all heads' keys and one of their values, of one rank. It shares over heads as
    LRKV does, and is its rival.

    Args:
      heads: that a rank is multiplied by: a table that counts channels of a head has as many.
    """
    methods = {rank: (joint_key_and_value(rank * heads, objective),) for rank in ranks}
    about = dict(method="thin_keys", mode="joint", part="key_value", objective=objective)
    return Curve(f"key_value_joint_{objective}", about, methods)


def joint_key_and_value(rank: int, objective: str) -> ThinKeys:
    """A latent of all heads' keys and one of their values."""
    return ThinKeys(rank=rank, mode="joint", part="key_value", objective=objective)


def keys_and_values(rank: int, objective: str) -> Methods:
    """Both thin, of a rank per head; of models without RoPE and norm of keys."""
    key = ThinKeys(rank=rank, objective=objective)
    return key, ThinKeys(rank=rank, part="value", objective=objective)


def lrkv(ranks: Sequence[int], objective: str, *, align: bool = True) -> Curve:
    """LRKV of one base, over ranks of the residuals."""
    methods = {rank: (LowRankKV(rank=rank, objective=objective, align=align),) for rank in ranks}
    name = f"lrkv_{objective}" if align else f"lrkv_{objective}_not_aligned"
    return Curve(name, dict(method="lrkv", objective=objective, align=align), methods)


def cached(mechanisms: Sequence[MechanismConfig]) -> int:
    """Elements that a cache keeps per token, of all layers."""
    return sum(math.prod(field.shape) for m in mechanisms for field in m.entry().values())


def figures(
    curve: Curve, mechanisms: Sequence[MechanismConfig], measure: Callable[[Methods], Measured]
) -> dict:
    """A curve's result, point by point.

    Args:
      mechanisms: of the original.
    """
    points = []
    with progress.waiting(f"measuring {curve.name}") as doing:
        for rank, methods in curve.methods.items():
            doing.at(f"rank {rank}")
            points.append(dict(rank=rank) | point(measure(methods), mechanisms))
    return curve.about | dict(points=points)


def point(measured: Measured, mechanisms: Sequence[MechanismConfig]) -> dict:
    """One point: elements cached per token, also as a share, perplexity, and energy lost."""
    elements = cached(measured.mechanisms)
    names = dict.fromkeys(name for errors in measured.errors for name in errors)
    lost = {name: statistics.mean(errors[name] for errors in measured.errors) for name in names}
    of_it = dict(cached=elements, share=elements / cached(mechanisms))
    return of_it | dict(perplexity=measured.perplexity, lost=lost)
