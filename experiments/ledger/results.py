"""Results as the ledger's rules ask for them."""

from collections.abc import Callable, Mapping

from etils import epath

from experiments import record
from kvjax.foundation import json_text
from kvjax.foundation.estimate import Estimate, difference

# What was trained: the studies of demo size, and `small_caches`.
TINY = "1.3M parameters, 1.0M tokens"
SMALL_CACHES = "1.3M parameters each, by the MLP's width, 2.1M tokens"


class NoResultError(Exception):
    """A result that a rule needs is not there."""


def read(name: str) -> dict:
    """A result; raises a NoResultError if it is not there, a UserError if it is damaged."""
    file = record.RESULTS / f"{name}.json"
    if not file.exists():
        raise NoResultError(name)
    return json_text.read_object(epath.Path(file), "restore it, or make it anew")


def study(name: str, cell: str) -> Callable[[], tuple[Estimate, int]]:
    """A cell's difference in bits per byte from what it is compared with; see `demo_size`."""

    def of() -> tuple[Estimate, int]:
        for row in read(f"studies/{name}")["rows"]:
            if row["cell"] == cell and row["difference"] is not None:
                half = row["difference_half_interval"]
                return Estimate(row["difference"], half), len(row["seeds"])
        raise NoResultError(name)

    return of


def between(name: str, first: str, second: str) -> Callable[[], tuple[Estimate, int]]:
    """First less second in bits per byte, seed by seed, of a study's runs."""

    def of() -> tuple[Estimate, int]:
        runs = read(name)["runs"]
        by_seed = lambda cell: {seed: run["bpb"] for seed, run in runs.get(cell, {}).items()}
        one, other = by_seed(first), by_seed(second)
        return paired(one, other, name)

    return of


def depth_8(step: int) -> Callable[[], tuple[Estimate, int]]:
    """LRKV less MHA in bits per byte at a step of `experiments.studies.depth_8`."""

    def of() -> tuple[Estimate, int]:
        for row in read("depth_8")["by_step"]:
            if (row["mechanism"], row["step"]) == ("lrkv", step):
                found = Estimate(row["difference"], row["difference_half_interval"])
                return found, len(row["seeds"])
        raise NoResultError(f"depth_8 at step {step}")

    return of


def paired(one: Mapping, other: Mapping, what: str) -> tuple[Estimate, int]:
    """One less other, by seed, and of how many; raises a NoResultError without a common one."""
    found = difference(one, other)
    if found is None:
        raise NoResultError(what)
    return found, len(one.keys() & other.keys())
