"""What all commands share: options, `--config=FILE --config.key=value`, errors, exit statuses.

A command is a function of its arguments that prints and returns an exit status or None:

    if __name__ == "__main__":
        command_line.run(main)

What the user must change ends it with one message on standard error and status 2, never with a
traceback; Ctrl-C with 130; a reader who has seen enough (`| head`) with 1 and no word.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import difflib
import os
import pathlib
import re
import runpy
import sys
import textwrap
import traceback
import typing
from typing import NoReturn

from kvjax import __version__
from kvjax.foundation import environment, extras, interrupted
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import NativePanicError, UserError, first_line, panics_as_errors
from kvjax.foundation.files import special

if typing.TYPE_CHECKING:
    import ml_collections

PREFIX = "--config"
DEFAULT_CONFIG = CONFIGS / "lrkv_tiny.py"

Command = Callable[[list[str]], int | None]


def run(command: Command) -> NoReturn:
    """Runs a command with this process's arguments and ends the process with its status."""

    def checked(arguments: list[str]) -> int | None:
        environment.check()
        return command(arguments)

    interrupted.quietly()
    _open_standard_streams()
    sys.exit(status(checked, sys.argv[1:]))


def status(command: Command, arguments: Sequence[str]) -> int:
    """Runs a command, prints what the user must change, and returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character is no error
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")
    try:
        try:
            with panics_as_errors():
                code = command(list(arguments)) or 0
        except SystemExit as error:  # --help, or a run that stopped on a signal
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()
        return 1
    except KeyboardInterrupt:
        interrupted.taken()
        say("interrupted")
        return interrupted.STATUS
    except Exception as error:
        if interrupted.taken():  # a library took it for an error of its own
            say("interrupted")
            return interrupted.STATUS
        reason = reason_of(error)
        if reason is None:
            raise
        say(reason)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            return 2
        _discard_output()
        return 2


def reason_of(error: Exception) -> str | None:
    """What to tell the user, or None where only a traceback helps: a bug."""
    text = str(error)
    if isinstance(error, (UserError, NotImplementedError)):
        return text
    if isinstance(error, ModuleNotFoundError) and (missing := extras.missing(error)):
        return missing
    if isinstance(error, OSError):
        return text or type(error).__name__
    if isinstance(error, NativePanicError):
        place = traceback.extract_tb(error.__cause__.__traceback__)[-1]
        return (
            f"a library that {place.filename} calls (line {place.lineno}) failed in its native "
            f"code: {text}. Is what it was given damaged?"
        )
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return f"out of memory ({first_line(error)}): ask for less at once, or a larger machine"
    return environment.refused(error)


@contextlib.contextmanager
def naming_options(options: argparse.Namespace) -> Iterator[None]:
    """Around what says "seed = -1: ..." of values that were given as options: --seed = -1."""
    try:
        yield
    except UserError as error:
        name, equals, rest = str(error).partition(" = ")
        if not equals or name not in vars(options):
            raise
        raise UserError(f"--{name} = {rest}") from error


def require(options: argparse.Namespace, **meant: str) -> None:
    """Raises a UserError for the first of these options that is empty, telling what is meant."""
    for name, what in meant.items():
        if not getattr(options, name):
            raise UserError(f"--{name} is missing: give {what}")


def say(message: str) -> None:
    """A line for the user on standard error, where no result is."""
    with contextlib.suppress(OSError, ValueError):  # it may be closed, or full
        print(f"kvjax: {message}", file=sys.stderr, flush=True)


def _open_standard_streams() -> None:
    """Opens /dev/null for what was closed (`<&-`): else the next file gets its number."""
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _discard_output() -> None:
    """Leaves nothing for the interpreter to write, and to fail on, when it exits."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def program() -> str:
    """How this process was started, without its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" where something known is close to a word, or ""."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class Parser(argparse.ArgumentParser):
    """argparse whose help is a module's docstring; what it cannot parse is a UserError."""

    def __init__(self, doc: str, *, config: bool = False):
        """
        Args:
          doc: the command's module docstring.
          config: whether the command takes `--config=FILE` and overrides of its keys.
        """
        super().__init__(
            prog=program(),
            description=doc.rstrip(),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self._takes_config = config
        if config:
            self.add_argument(
                PREFIX,
                type=_config_file,
                default=DEFAULT_CONFIG,
                metavar="FILE",
                help="the config; keys are overridden as --config.train.num_steps=100 "
                "(configs/lrkv_tiny.py; `python -m kvjax.main --help` lists the keys)",
            )
        self.add_argument("--version", action="version", version=f"kvjax {__version__}")

    def add_output(self) -> None:
        """Adds --json and --markdown, which `kvjax.foundation.output.Output` obeys."""
        text = "one line of JSON on standard output; the tables go to standard error"
        self.add_argument("--json", action="store_true", help=text)
        text = "tables as Markdown, as wide as they are"
        self.add_argument("--markdown", action="store_true", help=text)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options; of a command with a config also `overrides`, the keys given.

        Raises:
          UserError: an option that is not there (with the one that was meant) or a value of
            another type.
        """
        arguments, overrides = _split_overrides(arguments)
        if overrides and not self._takes_config:
            self._unknown(overrides)
        options, rest = self.parse_known_args(arguments)
        if rest:
            self._unknown(rest)
        if self._takes_config:
            options.overrides = overrides
        return options

    def _unknown(self, rest: Sequence[str]) -> NoReturn:
        given = rest[0].partition("=")[0]
        if not given.startswith("--"):
            raise UserError(f"unknown argument {rest[0]!r}: options start with --")
        known = sorted(o for a in self._actions for o in a.option_strings if o.startswith("--"))
        hint = did_you_mean(given, known) or "; --help lists the options"
        raise UserError(f"unknown option {given}{hint}")

    def _print_message(self, message, file=None):
        (file or sys.stderr).write(message)  # argparse's own says nothing of a full disk

    def error(self, message: str):
        wrong = re.fullmatch(r"argument (--\w+): invalid (\w+) value: (.*)", message, re.S)
        if wrong:
            option, kind, value = wrong.groups()
            expected = dict(int="a whole number", float="a number").get(kind, kind)
            message = f"{option}={value.strip(chr(39))}: must be {expected}"
        raise UserError(message.removeprefix("argument "))


def _config_file(text: str) -> pathlib.Path:
    if not text:
        raise UserError(f"{PREFIX}=: give a file, as in {PREFIX}=configs/lrkv_tiny.py")
    return config_file(pathlib.Path(os.path.expanduser(text)))


def config_file(file: pathlib.Path) -> pathlib.Path:
    """Returns the file itself if it exists, else the shipped config of that name, if there is one.

    `configs/lrkv_tiny.py` is found from any folder, and in an installed package.
    """
    first, *rest = file.parts or ("",)
    shipped = CONFIGS.joinpath(*rest)
    with contextlib.suppress(OSError):  # a name that is too long
        if first == CONFIGS.name and not file.exists() and shipped.exists():
            return shipped
    return file


class _Help(argparse.HelpFormatter):
    """Paragraphs filled to the terminal's width; what is indented in them stays as it is."""

    def _fill_text(self, text, width, indent):
        del indent
        paragraphs = text.split("\n\n")
        return "\n\n".join(p if "\n " in f"\n{p}" else textwrap.fill(p, width) for p in paragraphs)


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without those of config keys, and those as --config.key=value each."""
    others, overrides = [], []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if not argument.startswith((f"{PREFIX}.", f"--no{PREFIX[2:]}.")):
            others.append(argument)
            continue
        if "=" not in argument and left and not left[0].startswith("--"):
            argument = f"{argument}={left.pop(0)}"
        overrides.append(argument)
    return others, overrides


def config_names() -> dict[str, list[str]]:
    """The configs there are, without .py, by folder: "configs/", "configs/ranks/" and so on."""
    folders = sorted({path.parent for path in CONFIGS.rglob("*.py")})
    return {
        f"{folder.relative_to(CONFIGS.parent)}/": sorted(path.stem for path in folder.glob("*.py"))
        for folder in folders
    }


def load_config(file: pathlib.Path, overrides: Sequence[str] = ()) -> "ml_collections.ConfigDict":
    """The config that a file's `get_config()` gives.

    Args:
      file: a Python file, as in configs/.
      overrides: as on the command line: "--config.train.num_steps=100".

    Raises:
      UserError: the file, or a key of an override, is not there (the message says what is), or a
        value has another type.
    """
    config = _config_of(config_file(pathlib.Path(file)))
    if not overrides:
        return config
    from absl import flags
    from ml_collections import config_flags

    for override in overrides:
        _check(override, config)
    values = flags.FlagValues()
    name = PREFIX.removeprefix("--")
    argv = ["", *overrides]
    config_flags.DEFINE_config_dict(name, config, flag_values=values, sys_argv=argv)
    for override in overrides:
        try:
            values(["", override])
        except Exception as error:  # each type of value has its own
            raise UserError(f"{override}: {_expected(override, config)}") from error
    return values[name].value


def _config_of(file: pathlib.Path) -> "ml_collections.ConfigDict":
    import ml_collections

    try:
        there = file.is_file()
    except OSError as error:  # a name that is too long
        raise UserError(f"{PREFIX}={file}: {error.strerror}") from error
    if not there:
        raise UserError(f"{PREFIX}={file}: {_no_file(file)}")
    try:
        get_config = runpy.run_path(str(file)).get("get_config")
        config = get_config and get_config()
    except (Exception, SystemExit) as error:  # anything can be wrong with a file of Python
        raise UserError(f"{PREFIX}={file}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(
            f"{PREFIX}={file}: has no get_config() that returns a ConfigDict; see "
            "configs/lrkv_tiny.py"
        )
    return config.lock()


def _no_file(file: pathlib.Path) -> str:
    """What is wrong with the name of a config file, and what there is instead."""
    ours = {path.stem: path for path in sorted(CONFIGS.rglob("*.py"), reverse=True)}
    if file.is_dir():
        there = ", ".join(path.name for path in sorted(file.glob("*.py"))) or "no .py file"
        return f"is a folder; give a file. There: {there}"
    if kind := special(file):
        return f"is {kind}; give a file"
    close = difflib.get_close_matches(file.stem, ours, n=1, cutoff=0.7)
    if close:
        return f"no such file; did you mean {PREFIX}={_shipped_name(ours[close[0]])}?"
    return f"no such file; in {CONFIGS.name} there are {', '.join(sorted(ours))}"


def _shipped_name(file: pathlib.Path) -> str:
    """Returns a shipped config's name as `config_file` finds it: configs/ranks/lrkv_tiny.py."""
    return str(file.relative_to(CONFIGS.parent))


def _check(override: str, config: "ml_collections.ConfigDict") -> None:
    """Raises a UserError for an override that the config has no key for."""
    import ml_collections

    flag, equals, _ = override.partition("=")
    keys = flag.removeprefix("--no").removeprefix("--").split(".")[1:]
    section, here = config, "config"
    for key in keys:
        if not isinstance(section, ml_collections.ConfigDict):
            raise UserError(f"{flag}: {here} is a value, not a section")
        if key not in section:
            meant = did_you_mean(key, section) or _elsewhere(key, config)
            begin = f"{meant} It" if meant else "; it"
            raise UserError(
                f"{flag}: {here} has no key {key!r}{begin} has {', '.join(sorted(section))}"
            )
        section, here = section[key], f"{here}.{key}"
    if isinstance(section, ml_collections.ConfigDict):
        raise UserError(f"{flag}: {here} is a section; give one of {', '.join(sorted(section))}")
    if flag.startswith("--no") and (equals or not isinstance(section, bool)):
        raise UserError(f"{flag}: only a key that is true or false is negated, without a value")
    if not equals and not isinstance(section, bool):
        raise UserError(f"{flag}: give a value, as in {flag}={section}")


def _elsewhere(key: str, config: "ml_collections.ConfigDict") -> str:
    """ "; did you mean config.train.num_steps?" for a key of another section, or ""."""
    found = [f"config.{name}.{key}" for name, part in config.items() if _has(part, key)]
    return f"; did you mean {found[0]}?" if found else ""


def _has(part, key: str) -> bool:
    import ml_collections

    return isinstance(part, ml_collections.ConfigDict) and key in part


def _expected(override: str, config: "ml_collections.ConfigDict") -> str:
    """What a key that was given a value of another type may be."""
    value = config
    for key in override.partition("=")[0].removeprefix("--").split(".")[1:]:
        value = value[key]
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    kinds |= {tuple: "a tuple, as (8, 16)", list: "a list, as [8, 16]"}
    return f"must be {kinds.get(type(value), type(value).__name__)}; its default is {value!r}"
