"""Parses options and `--config=FILE --config.key=value`; maps errors to exit statuses.

A config file is Python with `get_config()`. A file with a table VARIANTS has `get_config(variant)`,
and FILE.py:VARIANT names one of its configs, as in ml_collections' config_flags.

A command is a function that takes its arguments, prints, and returns an exit status or None:

    if __name__ == "__main__":
        command_line.run(main)

User errors print one message on standard error and exit with status 2, without a traceback; Ctrl-C
exits with 130, a closed pipe (`| head`) with 1 and no message.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import difflib
import gc
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
from kvjax.foundation import environment, extras, interrupted, overrides as overrides_lib
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import NativePanicError, UserError, first_line, panics_as_errors
from kvjax.foundation.overrides import PREFIX
from kvjax.foundation.text import did_you_mean

if typing.TYPE_CHECKING:
    import ml_collections

DEFAULT_CONFIG = CONFIGS / "lrkv_tiny.py"

Command = Callable[[list[str]], int | None]


def run(command: Command) -> NoReturn:
    """Runs a command with this process's arguments and exits with its status."""
    gc.freeze()  # imported modules stay: later collections skip them
    gc.enable()
    interrupted.quietly()
    _open_standard_streams()
    sys.exit(status(command, sys.argv[1:]))


def status(command: Command, arguments: Sequence[str]) -> int:
    """Runs a command, prints its user error if there is one, and returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # the terminal's encoding may lack some characters
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")
    try:
        try:
            with panics_as_errors():
                code = command(list(arguments)) or 0
        except SystemExit as error:  # --help, or a run that stopped on a signal
            code = 0 if error.code is None else error.code
            code = code if isinstance(code, int) else 1
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
        if interrupted.taken():  # a library turned KeyboardInterrupt into its own exception
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
    """Returns the message for an error, or None for a bug, which needs its traceback."""
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
            f"{place.filename}, line {place.lineno}: a library failed in its native code: {text}. "
            "Is its input damaged?"
        )
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return f"out of memory ({first_line(error)}): reduce sizes, or use a larger machine"
    return environment.refused(error)


@contextlib.contextmanager
def naming_options(options: argparse.Namespace) -> Iterator[None]:
    """Rewrites "seed = -1: ..." to "--seed = -1: ..." in user errors about option values."""
    try:
        yield
    except UserError as error:
        name, equals, rest = str(error).partition(" = ")
        if not equals or name not in vars(options):
            raise
        raise UserError(f"--{name} = {rest}") from error


def require(options: argparse.Namespace, **descriptions: str) -> None:
    """Raises a UserError for the first of these options that is empty.

    Args:
      descriptions: for each option, a description of its value for the message.
    """
    for name, description in descriptions.items():
        if not getattr(options, name):
            raise UserError(f"--{name} is missing: give {description}")


def say(message: str) -> None:
    """Prints a line for the user on standard error."""
    with contextlib.suppress(OSError, ValueError):  # a closed stream, a full disk
        print(f"kvjax: {message}", file=sys.stderr, flush=True)


def _open_standard_streams() -> None:
    """Reopens closed standard streams (`>&-`) on /dev/null, before a file gets their descriptor."""
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: `number`
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _discard_output() -> None:
    """Redirects standard output to /dev/null, so that the flush at exit cannot fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def program() -> str:
    """Returns the command that started this process, without arguments."""
    if sys.argv[0].partition(" ")[0] == "kvjax":  # set by kvjax.__main__
        return sys.argv[0]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help is a module's docstring; parse errors are UserErrors."""

    def __init__(self, doc: str, *, config: bool = False):
        """Creates a parser with --version.

        Args:
          doc: the command's module docstring.
          config: add `--config=FILE` and overrides of its keys.
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
                help="config file, or FILE.py:VARIANT; override keys as "
                "--config.train.num_steps=100 (configs/lrkv_tiny.py; `python -m kvjax.main --help` "
                "lists the keys)",
            )
        self.add_argument("--version", action="version", version=f"kvjax {__version__}")

    def add_run(self) -> None:
        """Adds --workdir, --step, --dtype and --cache_dtype: a checkpoint, and how to decode."""
        add = self.add_argument
        add("--workdir", default="", help="a run's folder, local or gs://")
        add("--step", type=int, help="step of the checkpoint (the latest)")
        add("--dtype", default="", help="compute dtype (the run's)")
        add("--cache_dtype", default="", help="KV cache in int8 or int4 (in the compute dtype)")

    def add_output(self) -> None:
        """Adds --json and --markdown for `kvjax.foundation.output.Output`."""
        text = "one line of JSON on standard output; tables on standard error"
        self.add_argument("--json", action="store_true", help=text)
        text = "tables in Markdown, not wrapped"
        self.add_argument("--markdown", action="store_true", help=text)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the options; with a config also `overrides`, its keys' new values as arguments.

        Raises:
          UserError: an unknown option (with the closest known one) or a value of another type.
        """
        arguments, overrides = overrides_lib.split(arguments)
        if overrides and not self._takes_config:
            self._unknown(overrides)
        options, rest = self.parse_known_args(arguments)
        if rest:
            self._unknown(rest)
        if self._takes_config:
            options.overrides = overrides
        return options

    def _unknown(self, arguments: Sequence[str]) -> NoReturn:
        option = arguments[0].partition("=")[0]
        if not option.startswith("--"):
            raise UserError(f"unknown argument {arguments[0]!r}: options start with --")
        known = sorted(o for a in self._actions for o in a.option_strings if o.startswith("--"))
        hint = did_you_mean(option, known) or "; --help lists the options"
        raise UserError(f"unknown option {option}{hint}")

    def _print_message(self, message, file=None):
        (file or sys.stderr).write(message)  # argparse's own ignores a full disk

    def error(self, message: str):
        if match := re.fullmatch(r"argument (--\w+): expected one argument", message):
            raise UserError(f"{match[1]}: needs a value: {match[1]}=...")
        match = re.fullmatch(r"argument (--\w+): invalid (\w+) value: (.*)", message, re.S)
        if match:
            option, kind, value = match.groups()
            expected = dict(int="a whole number", float="a number").get(kind, kind)
            message = f"{option}={value.strip(chr(39))}: must be {expected}"
        raise UserError(message.removeprefix("argument "))


def _config_file(text: str) -> pathlib.Path:
    if not text:
        raise UserError(f"{PREFIX}=: give a file, as in {PREFIX}=configs/lrkv_tiny.py")
    return config_file(pathlib.Path(os.path.expanduser(text)))


def config_file(file: pathlib.Path) -> pathlib.Path:
    """Returns the file if it exists, or else the shipped config of that name if there is one.

    `configs/lrkv_tiny.py`, or `lrkv_tiny` for short, is found from any folder, and in an installed
    package. `ranks:lrkv_r16_128m` is short for `configs/ranks.py:lrkv_r16_128m`.
    """
    if split_variant(file)[0].is_file():
        return file
    first, *rest = file.parts or ("",)
    stem, colon, variant = str(file).partition(":")
    relative = f"{stem}.py{colon}{variant}" if stem.isidentifier() else "/".join(rest)
    shipped = CONFIGS / relative
    is_shipped = first == CONFIGS.name or stem.isidentifier()
    return shipped if is_shipped and split_variant(shipped)[0].is_file() else file


def split_variant(file: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Splits configs/ranks.py:lrkv_r16_128m into file and variant ("" for none)."""
    path, colon, variant = str(file).partition(".py:")
    return (pathlib.Path(f"{path}.py"), variant) if colon else (file, "")


def config_label(file: pathlib.Path) -> str:
    """Returns the variant, or the stem of a file with one config."""
    path, variant = split_variant(file)
    return variant or path.stem


def configs_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the configs of a file: FILE.py:VARIANT for each variant, or the file itself."""
    if "\nVARIANTS" not in path.read_text("utf-8"):
        return [path]
    return [path.with_name(f"{path.name}:{name}") for name in runpy.run_path(str(path))["VARIANTS"]]


def config_files(folder: pathlib.Path = CONFIGS) -> list[pathlib.Path]:
    """Returns the configs of a folder's files, as `configs_of` names them."""
    return [config for path in sorted(folder.glob("*.py")) for config in configs_of(path)]


def configs_beside(file: pathlib.Path) -> list[pathlib.Path]:
    """Returns all variants of the config's file or, without a variant, its folder's plain files."""
    path, variant = split_variant(file)
    if variant:
        return configs_of(path)
    return [other for other in sorted(path.parent.glob("*.py")) if configs_of(other) == [other]]


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal's width, except paragraphs with indented lines."""

    def _fill_text(self, text, width, indent):
        del indent
        paragraphs = text.split("\n\n")
        return "\n\n".join(p if "\n " in f"\n{p}" else textwrap.fill(p, width) for p in paragraphs)


def config_list() -> dict[str, str]:
    """Returns the rows of a listing, by first column: plain files, then files with variants."""
    single, several = [], {}
    for path in sorted(CONFIGS.glob("*.py")):
        text = path.read_text("utf-8")
        if "\nVARIANTS" in text:
            first_line, *_ = text.removeprefix('"""').splitlines()
            several[f"{_shipped_name(path)}:VARIANT"] = first_line
        else:
            single.append(path.stem)
    return {f"{CONFIGS.name}/": " ".join(single)} | several


def load_config(file: pathlib.Path, overrides: Sequence[str] = ()) -> "ml_collections.ConfigDict":
    """Returns the config of a file's `get_config()`, with overrides applied.

    Args:
      file: a Python file, as in configs/, or FILE.py:VARIANT.
      overrides: as on the command line: "--config.train.num_steps=100".

    Raises:
      UserError: no such file or key (the message lists the known ones), or a value of another type.
    """
    config = _config_of(config_file(pathlib.Path(file)))
    return overrides_lib.apply(config, overrides) if overrides else config


def _config_of(file: pathlib.Path) -> "ml_collections.ConfigDict":
    import ml_collections

    path, variant = split_variant(file)
    if not path.is_file():
        raise UserError(f"{PREFIX}={file}: {_no_file(path, variant)}")
    with _errors_of_file(file):
        names = runpy.run_path(str(path))
    variants, get_config = names.get("VARIANTS", {}), names.get("get_config")
    if variants and variant not in variants:
        raise UserError(f"{PREFIX}={file}: {_no_variant(path, variant, list(variants))}")
    with _errors_of_file(file):
        config = get_config and get_config(*([variant] if variant else []))
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(
            f"{PREFIX}={file}: needs a get_config() that returns a ConfigDict, as in "
            "configs/lrkv_tiny.py"
        )
    return config.lock()


@contextlib.contextmanager
def _errors_of_file(file: pathlib.Path) -> Iterator[None]:
    """Turns any error of a config file's code into a UserError."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a config is any Python code
        raise UserError(f"{PREFIX}={file}: {type(error).__name__}: {first_line(error)}") from error


def _no_variant(path: pathlib.Path, variant: str, known: list[str]) -> str:
    """Returns the message for an unknown variant of a file, or for a missing one ("")."""
    if not variant:
        return f"give one of its variants, as {PREFIX}={path}:{known[0]}; there are {_list(known)}"
    close = difflib.get_close_matches(variant, known, cutoff=0.7)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {_list(known)}"
    return f"no variant {variant!r}; {hint}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _no_file(file: pathlib.Path, variant: str) -> str:
    """Returns the problem with a config file's name, and the closest existing names."""
    if file.is_dir():
        files = ", ".join(path.name for path in sorted(file.glob("*.py"))) or "no .py file"
        return f"is a folder; give a file. It has {files}"
    configs, names = {}, set()
    for config in config_files():
        path, name = split_variant(config)
        if (path.stem, name) == (file.parent.name, file.stem):  # formerly a file per variant
            return f"has moved: give {PREFIX}={_shipped_name(config)}"
        if not name or name not in configs:
            configs[name or path.stem] = config
        names.add(f"{path.name}:VARIANT" if name else path.stem)
    close = difflib.get_close_matches(variant or file.stem, configs, n=1, cutoff=0.7)
    if close:
        return f"no such file; did you mean {PREFIX}={_shipped_name(configs[close[0]])}?"
    return f"no such file; in {CONFIGS.name} there are {_list(names)}"


def _shipped_name(file: pathlib.Path) -> str:
    """Returns a shipped config's name as `config_file` finds it: configs/lrkv_tiny.py."""
    return str(file.relative_to(CONFIGS.parent))
