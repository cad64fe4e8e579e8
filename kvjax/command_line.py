"""Parsing `--config=FILE --config.key=value` with errors that name what is there."""

import pathlib
import runpy
import sys

from absl import app
from absl import flags
import ml_collections
from ml_collections import config_flags

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


def load_config(
    file: pathlib.Path, overrides: list[str] | None = None
) -> ml_collections.ConfigDict:
    """The config that a file's `get_config()` gives.

    Args:
      file: a Python file, as in configs/.
      overrides: as on the command line: "--config.train.num_steps=100".

    Raises:
      UserError: the file, or a key of an override, is not there (the message says what is), or a
        value has another type.
    """
    if not file.is_file():
        there = sorted(path.name for path in file.parent.glob("*.py"))
        beside = f"in {file.parent} there are {', '.join(there)}" if there else "nor any beside it"
        raise UserError(f"--config={file}: no such file; {beside}")
    if not overrides:
        try:
            get_config = runpy.run_path(str(file)).get("get_config")
            config = get_config and get_config()
        except Exception as error:  # anything can be wrong with a file of Python
            raise UserError(f"--config={file}: {type(error).__name__}: {error}") from error
        if not isinstance(config, ml_collections.ConfigDict):
            raise UserError(
                f"--config={file}: has no get_config() that returns a ConfigDict; see "
                "configs/lrkv_tiny.py"
            )
        return config
    argv = ["", f"{PREFIX}={file}", *overrides]
    _check(argv)
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file(
        PREFIX.removeprefix("--"), None, flag_values=values, sys_argv=argv
    )
    try:
        rest = values(argv)[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    if rest:
        raise UserError(f"unknown argument {rest[0]!r}: options start with --")
    return config.value


def _check(argv: list[str]) -> None:
    """Raises a UserError for a config file that is not there, or an override it has no key for."""
    given = dict(a.split("=", 1) for a in argv[1:] if a.startswith(PREFIX) and "=" in a)
    if PREFIX not in given:
        return  # `--config FILE`: absl reports what is wrong with it
    config = load_config(pathlib.Path(given.pop(PREFIX)))
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
