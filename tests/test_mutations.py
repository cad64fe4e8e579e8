"""The tool that plants bugs: who notices is told, and the tree is as before."""

import json
import subprocess
import sys

import pytest

from kvjax.foundation.checkout import ROOT
from tests import mutations

RESULT = json.loads((ROOT / "experiments/results/mutations.json").read_text("utf-8"))


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "kvjax/room").mkdir(parents=True)
    (tmp_path / "tests/room").mkdir(parents=True)
    (tmp_path / "kvjax/room/sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = slow\n  aot\n")
    (tmp_path / "tests/room/test_sums.py").write_text(
        "import pytest\n"
        "from kvjax.room.sums import add\n"
        "def test_zeros(): assert add(0, 0) == 0\n"
        "@pytest.mark.slow\n"
        "def test_sums(): assert add(2, 3) == 5\n"
        "@pytest.mark.aot\n"
        "def test_never(): raise AssertionError\n"
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "new, who, test",
    [
        ("a + b + 1", "make test", "test_zeros"),
        ("a * b", "make test", None),
        ("a * b", "make test-all", "test_sums"),
    ],
)
def test_who_notices(tree, new, who, test):
    before = (tree / "kvjax/room/sums.py").read_text()
    mutation = dict(file="kvjax/room/sums.py", old="a + b", new=new, bug="")
    found = mutations._try(tree, mutation, who, workers=0)
    missed = dict(caught_by=None, missed_by=[who])
    caught = dict(caught_by=who, test=f"tests/room/test_sums.py::{test}")
    assert found == (caught if test else missed)
    assert (tree / "kvjax/room/sums.py").read_text() == before


def test_a_text_that_is_not_there_once_is_refused(tree):
    mutation = dict(file="kvjax/room/sums.py", old="a", new="b", bug="")
    with pytest.raises(SystemExit, match="'a' does not occur once: update it"):
        mutations._try(tree, mutation, "make test")


@pytest.mark.slow
def test_a_test_that_fails_anyway_tells_nothing(tree):
    (tree / "tests/room/test_sums.py").write_text("def test_wrong(): assert False")
    with pytest.raises(SystemExit, match="test_wrong fails without the bug too"):
        mutation = dict(file="kvjax/room/sums.py", old="a + b", new="a", bug="")
        mutations._try(tree, mutation, "make test", workers=0)


def test_the_table():
    found = [dict(caught_by="make test"), dict(caught_by=None, missed_by=[*mutations.PHASES]), {}]
    found.append(dict(caught_by=None, missed_by=["make test"]))  # under way
    text = mutations.table([dict(file="kvjax/x.py", bug="wrong") | f for f in found])
    assert text.splitlines()[2:] == [
        "| x.py | wrong | make test |",
        "| x.py | wrong | **nobody** |",
        "",
        "make test: 1, **nobody**: 1",
    ]


def test_what_was_planted_can_be_planted_again():
    """Code that moves takes its bugs with it."""
    texts = {m["file"]: (ROOT / m["file"]).read_text("utf-8") for m in RESULT["mutations"]}
    counts = {(m["file"], m["old"]): texts[m["file"]].count(m["old"]) for m in RESULT["mutations"]}
    assert {place: count for place, count in counts.items() if count != 1} == {}


@pytest.mark.slow
def test_who_noticed_still_runs_where_the_table_says():
    """A test that moves to `make test-all` takes its promise with it."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    for phase, marks in mutations.PHASES.items():
        done = subprocess.run(
            [*command, "-m", marks], cwd=ROOT, capture_output=True, text=True, check=True
        )
        runs = set(done.stdout.splitlines())
        named = {m["test"] for m in RESULT["mutations"] if m.get("caught_by") == phase}
        assert named
        assert sorted(named - runs) == []
