"""Builds the conversion method from command-line options; refuses options that do not apply."""

import argparse
from collections.abc import Callable

from kvjax.convert.latent_method import LatentAttention
from kvjax.convert.methods import LowRankKV, Method, ThinKeys
from kvjax.convert.pooled_heads import PooledHeads
from kvjax.foundation.configuration import at_least, between, one_of
from kvjax.foundation.errors import UserError

FITTED = ("thin_keys", "lrkv", "mla", "gqa")  # methods that `auto` compares
METHODS = ("none", *FITTED, "auto")
_RANKS = ("rank", "energy", "cache")  # exactly one is given
_CALIBRATION = ("calibrate", "calibrate_tokens", "refit")
_METHODS_WITH = {  # by option, the methods that it applies to
    "cache": METHODS[1:],
    **dict.fromkeys(("multiple", *_CALIBRATION), ("thin_keys", "lrkv", "mla", "auto")),
    "rank": FITTED,
    **dict.fromkeys(("energy", "objective"), ("thin_keys", "lrkv")),
    "rope_dim": ("mla",),
    "attention_length": ("mla", "auto"),
    **dict.fromkeys(("mode", "part", "value_rank"), ("thin_keys",)),
    **dict.fromkeys(("bases", "align"), ("lrkv",)),
}


def fill_defaults(options: argparse.Namespace, default: Callable[[str], object]) -> None:
    """Fills in options whose default depends on other options.

    Args:
      default: returns an option's default by name.

    Raises:
      UserError: a value is impossible, or an option does not apply to the method.
    """
    if options.method is None:
        options.method = "none" if options.cache is None else "thin_keys"
    fill_method(options)
    _check(options, default)
    if options.refit is None:
        options.refit = can_refit(options.method) and options.objective != "weights"
    if options.method == "gqa":
        options.objective = PooledHeads.objective


def fill_method(options: argparse.Namespace) -> None:
    """Fills in --mode and --part of thin_keys.

    With --rank each head has a latent, as in the paper. --cache and --energy choose a joint latent,
    which loses less at the same cache size. Only --cache also factors values.
    """
    if options.method == "thin_keys":
        options.mode = options.mode or ("per_head" if options.rank is not None else "joint")
        options.part = options.part or ("key" if options.cache is None else "key_value")


def can_refit(method: str) -> bool:
    """Returns True if output projections may be regressed after this method."""
    return method in _METHODS_WITH["refit"]


def splits_budget(options: argparse.Namespace) -> bool:
    """Returns True if --cache is split between keys and values."""
    return options.cache is not None and options.part == "key_value"


def _check(options: argparse.Namespace, default: Callable[[str], object]) -> None:
    one_of("method", options.method, METHODS)
    for name in ("calibrate_tokens", "row_length", "multiple", "attention_length"):
        at_least(name, getattr(options, name), 1)
    if options.evaluate_tokens is not None:
        at_least("evaluate_tokens", options.evaluate_tokens, 0)
    for name, methods in _METHODS_WITH.items():
        value = getattr(options, name)
        if value == default(name) or (name == "refit" and not value):
            continue
        if options.method not in methods:
            raise UserError(f"--{name}={value}: only with --method={' or '.join(methods)}")
        if name in _CALIBRATION and options.objective == "weights":
            raise UserError(f"--{name}={value}: only with --objective=inputs or outputs")
    if options.method != "none":
        _check_rank(options)
    make_method(options)  # raises for values that the method itself refuses


def _check_rank(options: argparse.Namespace) -> None:
    """Raises a UserError unless exactly one option gives the rank, and suits --part."""
    rank_options = [name for name in _RANKS if getattr(options, name) is not None]
    if not rank_options:
        examples = dict(rank="--rank=32", energy="--energy=0.95", cache="--cache=0.5")
        known = [name for name in _RANKS if options.method in _METHODS_WITH[name]]
        needed = ", ".join(examples[name] for name in known)
        needed = f"one of {needed}" if len(known) > 1 else needed
        raise UserError(f"--{known[0]} is missing: --method={options.method} needs {needed}")
    if len(rank_options) > 1:
        raise UserError(f"--{rank_options[0]} and --{rank_options[1]}: give one of them")
    for name in ("energy", "cache"):
        if getattr(options, name) is not None:
            between(name, getattr(options, name), 0.0, 1.0)
    if options.cache == 0:
        raise UserError("--cache=0: must be more than 0")
    if options.cache is not None and options.part == "query":
        raise UserError(f"--cache={options.cache}: queries are not cached: give --rank or --energy")
    if options.value_rank is None:
        return
    if options.part != "key_value":
        raise UserError(f"--value_rank={options.value_rank}: only with --part=key_value")
    if options.rank is None:
        raise UserError(
            f"--value_rank={options.value_rank}: only with --rank, not --{rank_options[0]}"
        )
    at_least("value_rank", options.value_rank, 1)


def make_method(options: argparse.Namespace) -> Method | None:
    """Returns the method, or None for "none" and "auto".

    Its rank is a placeholder where --energy or --cache chooses ranks later.
    """
    if options.method in ("none", "auto"):
        return None
    by_layer = options.rank is None and not splits_budget(options)
    rank = 1 if options.rank is None else options.rank
    if options.method == "gqa":
        return PooledHeads(rank)
    if options.method == "mla":
        return LatentAttention(rank=2 if options.rank is None else rank, rope_dim=options.rope_dim)
    if options.method == "lrkv":
        return LowRankKV(
            rank=rank,
            objective=options.objective,
            bases=options.bases,
            align=options.align,
            step=options.multiple if by_layer else 0,
        )
    return ThinKeys(
        rank=rank,
        objective=options.objective,
        mode=options.mode,
        part=options.part,
        value_rank=options.value_rank or 0,
        absorb=not by_layer,
    )


def recorded(options: argparse.Namespace) -> dict[str, object]:
    """Returns the options that determine a conversion, for its record."""
    names = [name for name, methods in _METHODS_WITH.items() if options.method in methods]
    if options.objective == "weights":
        names = [name for name in names if name not in _CALIBRATION]
    else:
        names.append("row_length")
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
