"""The options of studies, and the estimates in their rows."""

import argparse
from collections.abc import Collection, Mapping, Sequence
import functools
import os
import pathlib

from experiments import record
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.configuration import at_least, between
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate

_MOST_SEEDS = 1000


class Parser(command_line.Parser):
    """A parser with --seeds, --mix, --fresh, --save and the output options; checks what it parses.

    Args:
      result: name of the result that --save writes.
      seeds: default of --seeds; 0: without this option.
      trains: the study trains its runs; without it, there are no --mix and --fresh.
    """

    def __init__(self, doc: str, result: str, *, seeds: int = 3, trains: bool = True):
        super().__init__(doc)
        self._lists, self._least = {}, {}
        add = self.add_argument
        if seeds:
            add("--seeds", type=int, default=seeds, help=f"runs of each model ({seeds})")
        if trains:
            add("--mix", action="store_true", help="accept runs that other code trained")
            add("--fresh", action="store_true", help="begin a new result")
        add("--save", action="store_true", help=f"write experiments/results/{result}.json")
        self.add_output()

    def names(self, option: str, known: Collection[str], default: Sequence[str] = ()) -> None:
        """Adds an option with a list of known names; its default is `default`, or all names."""
        shown = ",".join(default) or "all"
        text = f"of {', '.join(known)} ({shown})"
        self.add_argument(f"--{option}", default=",".join(default or known), help=text)
        self._lists[option] = functools.partial(lists.names, known=known)

    def integers(self, option: str, default: Sequence[int], text: str) -> None:
        """Adds an option with a list of integers."""
        shown = ",".join(map(str, default))
        self.add_argument(f"--{option}", default=shown, help=f"{text} ({shown})")
        self._lists[option] = lists.integers

    def count(self, option: str, default: int, text: str, least: int = 1) -> None:
        """Adds an option with an integer of at least `least`."""
        self.add_argument(f"--{option}", type=int, default=default, help=text)
        self._least[option] = least

    def runs(self, folder: str) -> None:
        """Adds --runs and --processes, for studies whose runs have workdirs."""
        cores = os.cpu_count()
        self.add_argument("--runs", default=folder, help=f"folder of the runs ({folder})")
        self.count(
            "processes", cores, f"runs in parallel, each on its share of the cores ({cores})"
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        options = super().parse(arguments)
        for option, read in self._lists.items():
            setattr(options, option, read(f"--{option}", getattr(options, option)))
        for option, least in self._least.items():
            at_least(f"--{option}", getattr(options, option), least)
        if "seeds" in options:
            between("--seeds", options.seeds, 1, _MOST_SEEDS)
        record.check(options.save)
        return options


def local_folder(runs: str) -> pathlib.Path:
    """Creates the folder of --runs and returns its path.

    Raises:
      UserError: --runs is empty, or not a local path.
    """
    if not runs:
        raise UserError("--runs= is empty: give a folder, as runs/studies")
    if "://" in runs:
        raise UserError(f"--runs = {runs!r}: must be a local folder")
    folder = pathlib.Path(runtime.folder("--runs", runs))
    record.check_folder("--runs", folder)
    return folder


# -- estimates in rows -----------------------------------------------------------------------------

_HALF = "half_interval"


def estimated(name: str, interval: Estimate | None, half: str = "") -> dict[str, float | None]:
    """Returns the two entries of an estimate in a row: its mean and its half interval.

    Args:
      half: key of the half interval; "": `name_half_interval`.
    """
    half = half or f"{name}_{_HALF}"
    return {name: interval and interval.mean, half: interval and interval.half}


def shown(
    row: Mapping | None, name: str, form: str, times: float = 1.0, *, missing: str = "-"
) -> str:
    """Formats an estimate of a row; `missing` if there is none."""
    if not row or row.get(name) is None:
        return missing
    half = row[f"{name}_{_HALF}"] if f"{name}_{_HALF}" in row else row[_HALF]
    return Estimate(row[name], half).times(times).shown(form)
