"""Links, files and commands of the pages exist; their tables are what commands print."""

import importlib.util
import itertools
import re

import pytest

from experiments.record import EXPERIMENTS
from experiments.tables import decode_roofline, figures, parameter_table
from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from tests import page_commands
from tests.cache.test_quantized import AT_2P5B

PAGES = tuple(
    f"experiments/reports/{f.name}" for f in sorted((EXPERIMENTS / "reports").glob("*.md"))
)
DOCS = tuple(f"docs/{f.name}" for f in sorted((ROOT / "docs").glob("*.md")))
FILES = ("README.md", "AGENTS.md", "configs/README.md", "experiments/README.md", *PAGES, *DOCS)
OURS = ("kvjax", "experiments", "configs", "docs", "tests", "notebooks")


def _text(name):
    return (ROOT / name).read_text()


def _links(name):
    """Returns the links to files of the repository, or to headings in them."""
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", _text(name))


def _anchors(text):
    """Returns the anchors that GitHub gives to a file's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def _braces(path):
    """The paths of one with braces: a_{x,y}.py is two."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def _exists(path):
    """Returns True if a path of the repository, which may be a pattern, exists."""
    return any(ROOT.glob(path.rstrip("/")))


def test_the_readme_is_short():
    assert len(_text("README.md").splitlines()) <= 200


def test_the_readme_has_the_bytes_of_quantised_caches():
    table = [line for line in _text("README.md").splitlines() if line.startswith("| ")]
    found = set(re.findall(r"[\d,]*\d", " ".join(table)))
    for mechanism, counted in AT_2P5B:
        assert {f"{count:,}" for count in counted} <= found, mechanism.title


def test_every_page_of_reports_is_found():
    assert set(PAGES) <= {f"experiments/{link}" for link in _links("experiments/README.md")}


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name):
    for link in _links(name):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        target = target.resolve().relative_to(ROOT.resolve())
        assert _exists(str(target)), link
        assert not anchor or anchor in _anchors(_text(target)), link


@pytest.mark.parametrize("name", FILES)
def test_files_and_commands_that_are_named_are_there(name):
    text = _text(name)
    for path in re.findall(rf"(?<![\w./:*-])(?:{'|'.join(OURS)})/[\w./*{{}},]*[\w}}/]", text):
        for expanded in _braces(path):
            assert _exists(expanded), path
    for module in re.findall(r"python -m ([\w.]+)", text):
        if module.partition(".")[0] in OURS:
            assert importlib.util.find_spec(module.rstrip(".")), module
    targets = re.findall(r"(?m)^([\w-]+):", _text("Makefile"))
    for target in re.findall(r"(?m)(?:^    |`)make ([\w-]+)", text):
        assert target in targets, target


@pytest.mark.parametrize("name", FILES)
def test_commands_are_what_their_parsers_take(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in page_commands.commands(_text(name)):
        page_commands.check(words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "python -m kvjax.main --config=configs/lrkv_tny.py",
            "mean --config=configs/lrkv_tiny.py?",
        ),
        ("kvjax train --config=lrkv_tny", "no such file"),
        ("kvjax train --config.train.num_stps=2", "mean 'num_steps'?"),
        ("kvjax anayze", "there is no command kvjax anayze"),
        ("kvjax generate --chips=two", "--chips=two: must be a whole number"),
        ("kvjax profile --legnth=16", "mean '--length'?"),
        ("kvjax profile --mechanisms=mha,lrk", "mean 'lrkv'?"),
        ("kvjax sweep lrkv_tiny --set attention.rnk=4", "mean 'rank'?"),
        ("python -m experiments.studies.language_models --study=lrkv_start", "lrkv_start"),
        ("python -m experiments.studies.padded_loss --seeds=0", "--seeds"),
        ("pip install -c constraint.txt x", "there is no file constraint.txt"),
        ("pip install -e '.[amot]'", "kvjax has no extra amot"),
    ],
)
def test_mistakes_in_commands_are_found(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = (
        f"x\n\n    A=1 {line}  # a comment\n",
        f"```bash\n{line} | kvjax train\n```\n",
        f"Run `{line}`.",
    )
    for page in pages:
        words, *_ = page_commands.commands(page)
        with pytest.raises(UserError, match=re.escape(message)):
            page_commands.check(words)


@pytest.mark.parametrize(
    ("table", "page"), [(parameter_table, "configs"), (decode_roofline, "mechanisms")]
)
def test_tables_are_what_their_commands_print(capsys, table, page):
    assert command_line.status(table.main, ["--markdown"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in _text(f"experiments/reports/{page}.md"), f"python -m {table.__name__}"


@pytest.mark.slow
def test_pictures_show_the_results(capsys):
    assert command_line.status(figures.main, ["--check"]) == 0, capsys.readouterr().out
