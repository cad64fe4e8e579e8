"""Output of commands: tables that fit, Markdown, JSON alone on standard output."""

import argparse
import json

import pytest

from kvjax.foundation import output

HEADER = ("config", "parameters", "without input embedding", "against MHA", "why")
ROWS = [
    ("`mha_tiny`", "1,310,720", "1,048,576", "+0.0%", "-"),
    ("`lrkv_tiny`", "1,294,336", "1,032,192", "-1.2%", "a reason of several words that goes on"),
]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def _output(**options):
    return output.Output(argparse.Namespace(**(dict(json=False, markdown=False) | options)))


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_table_fits_and_loses_nothing(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = output.aligned(HEADER, ROWS)
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    for row in ROWS:
        assert all(cell in text for cell in row[:4])
    words = {w for line in lines for w in line.split()}
    assert {w for cell in (*HEADER, *ROWS[1]) for w in cell.split()} <= words


def test_wide_tables_continue_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    header = ["name", *(f"figure {i}" for i in range(8))]
    lines = output.aligned(header, [["x", *(f"{i},000,000" for i in range(8))]])
    blocks = "\n".join(lines).split("\n\n")
    assert len(blocks) == 3  # 4 + 3 x (2 + 9) = 37 columns of 40: three figures side by side
    assert all(block.split("\n")[-1].startswith("x ") for block in blocks)


def test_words_wrap_and_figures_do_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [["a/" * 60, "1.9 ± 0.1", "what is said of it"]]
    lines = output.aligned(["a path", "seconds per step", "why"], rows)
    assert max(map(len, lines)) <= 40
    assert any("1.9 ± 0.1" in line for line in lines)


def test_figures_are_aligned_right_and_words_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = output.aligned(["a", "b", "c"], [["x", "1", "one"], ["y", "1,000", "a"]])
    assert lines == [
        "a      b  c",
        "-  -----  ---",
        "x      1  one",
        "y  1,000  a",
    ]
    assert output.aligned(["a", "b"], []) == ["a  b", "-  -"]


def test_markdown():
    assert output.markdown(
        ["a", "b", "c"], [["x", 1, "y"], ["**z**", "**-2**", "y"], ["w", "-", "y"]]
    ) == [
        "| a | b | c |",
        "|---|---:|---|",
        "| x | 1 | y |",
        "| **z** | **-2** | y |",
        "| w | - | y |",
    ]


def test_json_stands_alone_on_standard_output(capsys):
    out = _output(json=True)
    out.say("words")
    out.table(HEADER, ROWS)
    out.result(dict(rows=2))
    printed, stderr = capsys.readouterr()
    assert json.loads(printed) == dict(rows=2) and printed.count("\n") == 1
    assert "words" in stderr and "1,310,720" in stderr


def test_without_json_there_is_none(capsys):
    out = _output()
    out.show(output.Table("title " * 30, HEADER, ROWS, ["a note"]))
    out.result(dict(rows=2))
    printed, stderr = capsys.readouterr()
    assert "{" not in printed and not stderr
    assert max(map(len, printed.splitlines())) <= 80
    above, _, table = printed.partition("\n\n")
    assert set(above.split()) == {"title"} and table.startswith("config")
    assert printed.endswith("\na note\n")


@pytest.mark.parametrize("options, wrap", [({}, False), (dict(markdown=True), True)])
def test_unwrapped_lines(capsys, options, wrap):
    command = "python -m kvjax.main " + "--config.train.num_steps=100 " * 9
    _output(**options).say(command, wrap=wrap)
    assert capsys.readouterr().out == f"{command}\n"
