"""Writes results with the command, machine, versions and commit that made them."""

import pathlib
import tempfile

from kvjax.foundation import provenance
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

EXPERIMENTS = pathlib.Path(__file__).parent
RESULTS = EXPERIMENTS / "results"


def check(save: bool) -> None:
    """Raises a UserError if results could not be saved; call it before measuring."""
    if save:
        check_folder("--save", RESULTS)
        provenance.check_commit("--save", RESULTS)


def check_folder(option: str, folder: pathlib.Path) -> None:
    """Creates a folder; raises a UserError that names the option if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{option}: cannot write into {folder} ({reason})") from error


def record(name: str, result: dict, out: Output, *, save: bool) -> None:
    """Prints the result to `out`; with `save` also writes results/<name>.json.

    Args:
      name: file name, may contain folders.
      result: JSON-able.
    """
    try:
        if save:
            keep(name, result)
    finally:  # printed even if it could not be written
        out.result({"name": name} | result)


def end(name: str, result: dict, out: Output, *, save: bool) -> int:
    """Prints the failures of a study's result and records it; returns 1 if a run failed."""
    for run, why in result["failed"].items():
        out.say(f"- left out: {run}, {why}")
    record(name, result, out, save=save)
    return 1 if result["failed"] else 0


def keep(name: str, result: dict, *, quiet: bool = False) -> None:
    """Writes results/<name>.json; prints the path unless `quiet`."""
    provenance.save(RESULTS / f"{name}.json", result, quiet=quiet)
