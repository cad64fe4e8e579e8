"""Parsing `--config=FILE --config.key=value` with errors that name what is there."""

import pathlib
import runpy
import sys

from absl import app
import ml_collections

from kvjax.errors import UserError

PREFIX = "--config"


def parse(argv: list[str], default: pathlib.Path) -> list[str]:
    """absl's parsing; what it cannot parse ends the process with one message and status 2.

    Args:
      argv: the command line; without --config, the default file is used.
    """
    if not any(a == PREFIX or a.startswith(f"{PREFIX}=") for a in argv):
        argv = [argv[0], f"{PREFIX}={default}", *argv[1:]]
    try:
        _check(argv)
        return app.parse_flags_with_usage(argv)
    except (UserError, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        print(f"kvjax: {error}", file=sys.stderr)
        sys.exit(2)


def _check(argv: list[str]) -> None:
    """Raises a UserError for a config file that is not there, or an override it has no key for."""
    given = dict(a.split("=", 1) for a in argv[1:] if a.startswith(PREFIX) and "=" in a)
    if PREFIX not in given:
        return  # `--config FILE`: absl reports what is wrong with it
    file = pathlib.Path(given.pop(PREFIX))
    if not file.is_file():
        there = sorted(path.name for path in file.parent.glob("*.py"))
        beside = f"in {file.parent} there are {', '.join(there)}" if there else "nor any beside it"
        raise UserError(f"--config={file}: no such file; {beside}")
    config = runpy.run_path(str(file))["get_config"]()
    for flag in given:
        section, here = config, "config"
        for key in flag.removeprefix(PREFIX + ".").split("."):
            if not isinstance(section, ml_collections.ConfigDict):
                raise UserError(f"{flag}: {here} is a value, not a section")
            if key not in section:
                raise UserError(
                    f"{flag}: {here} has no key {key!r}; it has {', '.join(sorted(section))}"
                )
            section, here = section[key], f"{here}.{key}"
