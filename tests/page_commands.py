"""The command lines of Markdown pages, read by the commands' own parsers; nothing is computed.

Found in blocks, and in inline code that begins so: `python -m MODULE`, `kvjax WORD`, `pip install`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
import shlex
from unittest import mock

from experiments import record
from experiments.studies import options as studies
from kvjax import config
from kvjax.__main__ import COMMANDS
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS, ROOT
from kvjax.foundation.errors import UserError

_BLOCK = re.compile(r"(?m)^```bash\n((?s:.*?))^```$|((?:^    .*\n)+)")
_INLINE = re.compile(r"(?<!`)`((?:python -m|kvjax|pip install) [^`]+)`")
_COMMAND = re.compile(r"^(?:\w+=\S+ )*(python -m (?:kvjax|experiments)\b|kvjax \w|pip install\b)")
_READERS = re.compile(r"\b[A-Z]{3,}\b")  # a word in capitals: FOLDER


def commands(text: str) -> list[list[str]]:
    """Returns the words of each command of a page, without variables, comments and pipes."""
    blocks = [fenced or indented for fenced, indented in _BLOCK.findall(text)]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += [" ".join(code.split()) for code in _INLINE.findall(text)]
    parts = [part for line in lines for part in re.split(r" (?:\||&&) ", line.strip())]
    starts = [(part, match) for part in parts if (match := _COMMAND.match(part))]
    return [shlex.split(part[match.start(1) :], comments=True) for part, match in starts]


def check(words: Sequence[str]) -> None:
    """Parses a command's options and resolves its config, if that is one of the repository.

    Values are checked too where a module has `_options`, unless one is for the reader to choose. A
    command without options is only mentioned. A sweep is planned, in the current folder.

    Raises:
      UserError: what the command would say.
    """
    if words[:2] == ["pip", "install"]:
        _check_install(words[2:])
        return
    module, arguments = _module(words)
    arguments = [word for word in arguments if word not in ("...", "--help")]
    if not module or not arguments:
        return
    is_package = importlib.util.find_spec(module).submodule_search_locations
    command = importlib.import_module(f"{module}.__main__" if is_package else module)
    with mock.patch.object(record, "check"):  # of --save: uncommitted changes
        if module == "kvjax.sweep":
            command.main([*arguments, "--plan"])
        elif hasattr(command, "_options") and not _READERS.search(" ".join(arguments)):
            _check_config(command._options(arguments))
        else:
            with contextlib.suppress(SystemExit), _stopping_after(_check_config):
                command.main(arguments)


def _module(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns a command's module, "" if it is for the reader to choose, and its arguments."""
    if words[:2] == ["python", "-m"]:
        return words[2], list(words[3:])
    if words[1] not in COMMANDS and not words[1].isupper():
        raise UserError(f"there is no command kvjax {words[1]}")
    module, _ = COMMANDS.get(words[1], ("", ""))
    return module, list(words[2:])


def _check_install(arguments: Sequence[str]) -> None:
    extras = importlib.metadata.metadata("kvjax").get_all("Provides-Extra")
    for word in arguments:
        match = re.fullmatch(r"(?:\.|kvjax)\[(.*)\]", word)
        for extra in match[1].split(",") if match else ():
            if extra not in extras:
                raise UserError(f"kvjax has no extra {extra}")
        if word.endswith(".txt") and not (ROOT / word).exists():
            raise UserError(f"there is no file {word}")


@contextlib.contextmanager
def _stopping_after(check: Callable[[argparse.Namespace], None]) -> Iterator[None]:
    """Ends a command when its options are parsed and have passed the check."""

    def stopping(parse):
        def parse_and_stop(self, arguments):
            options = parse(self, arguments)
            if type(self).parse is not parse_and_stop:  # called by a subclass, which checks more
                return options
            check(options)
            raise SystemExit(0)

        return parse_and_stop

    with contextlib.ExitStack() as patches:
        for parser in (command_line.Parser, studies.Parser):
            patches.enter_context(mock.patch.object(parser, "parse", stopping(parser.parse)))
        yield


def _check_config(options: argparse.Namespace) -> None:
    """Resolves the configs that the repository has, with overrides."""
    files = getattr(options, "config", None) or []
    for name in files if isinstance(files, list) else [files]:
        file = command_line.config_file(pathlib.Path(name))
        ours = file.is_relative_to(CONFIGS) or file.parts[0] == CONFIGS.name
        if ours or not (file.suffix or file.name.isupper()):
            config.resolve(command_line.load_config(file, getattr(options, "overrides", ())))
