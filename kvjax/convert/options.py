"""The method that a command line asks for, from options that fit together."""

import argparse
from collections.abc import Callable

from kvjax.convert.methods import LowRankKV, Method, ThinKeys
from kvjax.foundation.configuration import at_least, between, one_of
from kvjax.foundation.errors import UserError

METHODS = ("none", "thin_keys", "lrkv")
_RANKS = ("rank", "energy", "cache")  # ways to say it
_OF_TEXT = ("calibrate", "calibrate_tokens")
_OF_METHODS = dict(  # options by the methods that have them
    **dict.fromkeys((*_RANKS, "multiple", "objective", *_OF_TEXT), METHODS[1:]),
    **dict.fromkeys(("mode", "part", "value_rank"), ("thin_keys",)),
    **dict.fromkeys(("bases", "align"), ("lrkv",)),
)


def fill_defaults(options: argparse.Namespace, default: Callable[[str], object]) -> None:
    """Fills in what follows from the options that were given.

    --cache alone asks for keys and values of low rank. A rank is a head's unless a mode is given,
    as thin keys has it; a latent of all heads loses less in a cache of the same size.

    Args:
      default: of the option of that name.

    Raises:
      UserError: values that cannot be, and options that the method does not have.
    """
    if options.method is None:
        options.method = "none" if options.cache is None else "thin_keys"
    if options.method == "thin_keys":
        options.mode = options.mode or ("per_head" if options.rank is not None else "joint")
        options.part = options.part or ("key" if options.cache is None else "key_value")
    _check(options, default)


def splits_budget(options: argparse.Namespace) -> bool:
    """True if a budget of the cache is split between keys and values."""
    return options.cache is not None and options.part == "key_value"


def _check(options: argparse.Namespace, default: Callable[[str], object]) -> None:
    one_of("method", options.method, METHODS)
    for name in ("calibrate_tokens", "row_length", "multiple"):
        at_least(name, getattr(options, name), 1)
    if options.evaluate_tokens is not None:
        at_least("evaluate_tokens", options.evaluate_tokens, 0)
    changed = [name for name in _OF_METHODS if getattr(options, name) != default(name)]
    for name in changed:
        of, value = _OF_METHODS[name], getattr(options, name)
        if options.method not in of:
            raise UserError(f"--{name}={value}: is of --method={' and '.join(of)} alone")
        if name in _OF_TEXT and options.objective == "weights":
            raise UserError(f"--{name}={value}: is of --objective=inputs and outputs alone")
    if options.method != "none":
        _check_rank(options)


def _check_rank(options: argparse.Namespace) -> None:
    """It is said in one way, and in one that the part has."""
    given = [name for name in _RANKS if getattr(options, name) is not None]
    if not given:
        needs = f"--method={options.method} needs one, as --rank=32"
        raise UserError(f"--rank is missing: {needs}, or --energy=0.95, or --cache=0.5")
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]}: give one of them")
    for name in ("energy", "cache"):
        if getattr(options, name) is not None:
            between(name, getattr(options, name), 0.0, 1.0)
    if options.cache == 0:
        raise UserError("--cache=0: must be more than 0")
    if options.cache is not None and options.part == "query":
        raise UserError(f"--cache={options.cache}: queries are not cached: give --rank or --energy")
    if options.value_rank is None:
        return
    said = f"--value_rank={options.value_rank}"
    if options.part != "key_value":
        raise UserError(f"{said}: is of --part=key_value alone")
    if options.rank is None:
        raise UserError(f"{said}: is of --rank alone, not of --{given[0]}")
    at_least("value_rank", options.value_rank, 1)


def make_method(options: argparse.Namespace) -> Method | None:
    """The method, of rank 1 where layers get their own; None: the model is kept as it is."""
    if options.method == "none":
        return None
    by_layer = options.rank is None and not splits_budget(options)
    shared = dict(rank=1 if options.rank is None else options.rank, objective=options.objective)
    if options.method == "lrkv":
        step = options.multiple if by_layer else 0
        return LowRankKV(**shared, bases=options.bases, align=options.align, step=step)
    parts = dict(mode=options.mode, part=options.part, value_rank=options.value_rank or 0)
    return ThinKeys(**shared, **parts, absorb=not by_layer)


def recorded(options: argparse.Namespace) -> dict[str, object]:
    """The options that made a conversion what it is."""
    names = [name for name, of in _OF_METHODS.items() if options.method in of]
    if options.objective == "weights":
        names = [name for name in names if name not in _OF_TEXT]
    else:
        names.append("row_length")
    found = {name: getattr(options, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}
