"""The code blocks of the documentation's pages, and a command that runs those of one page.

    python -m tests.docs_pages layer     # in the current folder, as a reader would: files stay

Python blocks share one namespace, and `kvjax` commands run in the same process. A comment in front
of a block changes how a test runs it:

    <!-- test: skip: REASON -->          the block is not run
    <!-- test: add --config.train... --> options that make the run small
"""

import dataclasses
import importlib
import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys
import types

from kvjax.__main__ import COMMANDS
from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT

DOCS = ROOT / "docs"
PAGES = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
_BLOCK = re.compile(r"(?m)(?:^<!-- test: (\w+):? ?(.*?) -->\n)?^```(\w*)\n((?s:.*?))^```$")
_SHELL = 'kvjax() { python -m kvjax "$@"; }\n'  # where no console script is installed


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
      line: number of its first line.
      rule: "skip", "add" or "".
      text: the reason, or the options to add.
    """

    language: str
    code: str
    line: int
    rule: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block; a line that ends in a backslash continues."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(text: str) -> list[Block]:
    """Returns a page's code blocks in order."""
    result = []
    for match in _BLOCK.finditer(text):
        rule, reason, language, code = match.groups()
        line = text.count("\n", 0, match.start(4)) + 1
        result.append(Block(language, code, line, rule or "", reason or ""))
    return result


def run(page: pathlib.Path) -> None:
    """Runs the blocks of a page; an error names the page and the line of the block."""
    module = sys.modules["page"] = types.ModuleType("page")  # dataclasses look their module up
    for block in blocks(page.read_text()):
        if block.rule == "skip":
            continue
        print(f"== {page.name}, line {block.line}", flush=True)
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec"), vars(module))
        elif block.language == "bash":
            for command in block.commands:
                options = f" {block.text}" if block.rule == "add" else ""
                status = _shell(command + options)
                assert status == 0, f"{page.name}, line {block.line}: {command}: status {status}"


def _shell(line: str) -> int:
    """Runs a line of a shell, and returns its exit status."""
    words = shlex.split(line)
    if words[0] != "kvjax" or "|" in words:
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", _SHELL + line], check=False
        ).returncode
    name, _ = COMMANDS[words[1]]
    if importlib.util.find_spec(name).submodule_search_locations:
        name += ".__main__"
    return command_line.status(importlib.import_module(name).main, words[2:])


if __name__ == "__main__":
    run(PAGES[sys.argv[1]])
