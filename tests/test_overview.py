"""`python -m kvjax` lists commands and configs."""

import ast
import importlib
import pathlib
import subprocess
import sys

import kvjax
from kvjax import __main__ as overview
from kvjax.foundation import command_line


def test_commands_and_configs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command_line.status(overview.main, []) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word, (module, _) in overview.COMMANDS.items():
        assert f"kvjax {word:<9} {module} " in out and importlib.import_module(module)
    assert "lrkv_2p5b" in out
    assert out.endswith("\nIn a checkout, `python -m experiments` lists experiments.\n")


def test_no_command_is_left_out():
    package = pathlib.Path(kvjax.__file__).parent
    names = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__main__")
        for path in package.rglob("*.py")
        if "    command_line.run(" in path.read_text("utf-8").partition("\nif __name__ ==")[2]
    }
    assert names == {module for module, _ in overview.COMMANDS.values()}


def test_version_and_unknown_arguments():
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "kvjax", *arguments], capture_output=True, text=True, check=False
        )

    version = run("--version")
    assert (version.returncode, version.stdout) == (0, f"kvjax {kvjax.__version__}\n")
    wrong = run("--verison")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "kvjax: unknown option --verison; did you mean '--version'?\n"
    other = run("trian")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == "kvjax: unknown command 'trian'; did you mean 'train'?\n"
    assert run("costs", "--help").stdout.startswith("usage: kvjax costs ")


def test_dataclasses_that_can_be_changed():
    """All others are frozen: a config, a key of a compiled program, what is handed to a caller."""
    package = pathlib.Path(kvjax.__file__).parent
    changeable = {
        node.name
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if "dataclasses.dataclass" in (text := ast.unparse(decorator)) and "frozen=True" not in text
    }
    assert changeable == {
        *("Answer", "Candidate", "InitRngs", "SetCounts", "TaskRows", "Timing", "_Entry")
    }
