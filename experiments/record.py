"""How a result is written down: with the command, machine, versions and commit that made it."""

import json
import os
import pathlib
import tempfile

from kvjax.foundation import command_line
from kvjax.foundation.checkout import RESULTS
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.foundation.provenance import provenance


def check(save: bool) -> None:
    """Raises a UserError if what is measured could not be saved: to be called before."""
    if save:
        check_folder("--save", RESULTS)


def check_folder(option: str, folder: pathlib.Path) -> None:
    """Makes a folder; raises a UserError that names the option unless files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{option}: cannot write into {folder} ({reason})") from error


def record(name: str, result: dict, out: Output, *, save: bool) -> None:
    """Gives the result to `out`; with `save` also writes results/<name>.json.

    Args:
      name: file name, may contain folders.
      result: JSON-able.
    """
    out.result({"name": name} | result)
    if not save:
        return
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.new")  # a full disk leaves the old one
    whole.write_text(json.dumps(result | {"made_by": provenance()}, indent=1) + "\n")
    os.replace(whole, path)
    command_line.say(f"written: {os.path.relpath(path, RESULTS.parents[1])}")
