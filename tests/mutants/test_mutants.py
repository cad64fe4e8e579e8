"""Mutants: every operator, no changed messages and types, samples by seed, detecting tests."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from kvjax.foundation.checkout import ROOT
from tests.mutants import operators, sample, table

# All mutants of each statement.
MUTANTS = {
    "x = a < b": {"x = a <= b", "x = a >= b"},
    "x = a == b": {"x = a != b"},
    "x = a is not b": {"x = a is b"},
    "x = a not in b": {"x = a in b"},
    "x = a < b == c": {"x = a <= b == c", "x = a >= b == c", "x = a < b != c"},
    "x = (a + b) * c": {"x = (a - b) * c", "x = (a + b) / c"},
    "x = a // b % c": {"x = a * b % c", "x = a // b * c"},
    "x = -a": {"x = (a)"},
    "x += a": {"x -= a", "pass"},
    "x = a and b and c": {"x = a or b and c", "x = a and b or c"},
    "x = not (a or b)": {"x = (a or b)", "x = not (a and b)"},
    "x = b if a else c": {"x = b if (not (a)) else c"},
    "x = [a for a in b if a()]": {"x = [a for a in b if (not (a()))]"},
    "x = 3": {"x = 4"},
    "x = 0.5": {"x = 1.5"},
    "x = True": {"x = False"},
    "x = 'km'": {"x = 'kmXX'"},
    "x = f(a)": set(),
    "f(a)": {"pass"},
    "x.y = a": {"pass"},
    "x = f(x)": {"pass"},
    "del x[a]": {"pass"},
    "f(é, b)": {"f(b, é)", "pass"},
    "x = f(a, *b)": set(),
    "x = f(a, k=b, **c)": {"x = f(a,  **c)"},
    "x = f(k=(b),)": {"x = f()"},
    "x = f(k=b)(c, d)": {"x = f()(c, d)", "x = f(k=b)(d, c)"},
    "raise E(f'{a + 1}', 2)": {"pass"},
    "say(a + 1, 'words', k=2)": {"pass"},
    "x = add('--x', type=a, help='1')": {"x = add('--xXX', type=a, help='1')"}
    | {"x = add('--x',  help='1')"},
    "'a word'": set(),
    "x = 'two words'": set(),
    "x = f'{a + b:.3f} m'": {"x = f'{a - b:.3f} m'"},
    "x = 'a' + b": {"x = 'aXX' + b"},
    "x: int | None = None": set(),
    "x = Config | None": set(),
    "import a": set(),
    "return a": {"return None"},
    "return None": set(),
}


def test_mutants_of_statements():
    for statement, expected in MUTANTS.items():
        text = f"def g():\n    {statement}\n".encode()
        found = operators.mutants(text)
        changed = {m.apply(text).decode().partition("\n")[2].strip() for m in found}
        assert changed == expected, statement
        assert all(m.is_valid(text) and m.lines == (2, 2) for m in found), statement


@pytest.fixture
def tree(tmp_path):
    """A package of three files, with mutants that only some of its tests detect."""
    files = {
        "pytest.ini": "[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n"
        "markers = slow\n  aot\n  beam\n  lm_eval\n",
        "kvjax/main.py": """\
            import sys
            from kvjax.room import sums
            total = sums.add(int(sys.argv[1]), 2)
            print(total)
            """,
        "kvjax/room/sums.py": """\
            STEP = 3
            def add(a, b):
                return a + b
            def step(a):
                return a * STEP
            def hidden(a):
                return a / 5
            """,
        "kvjax/hall/area.py": "def area(a, b):\n    return a * b\n",
        "tests/test_main.py": """\
            import subprocess, sys
            def test_main():
                run = [sys.executable, "-m", "kvjax.main", "5"]
                assert subprocess.check_output(run, text=True) == "7\\n"
            """,
        "tests/room/test_sums.py": """\
            import pytest
            from kvjax.room import sums
            def test_zeros(): assert sums.add(0, 0) == 0
            def test_steps(): assert sums.step(2) == 6
            def test_wrong(): assert sums.step(2) == 7
            @pytest.mark.slow
            def test_hidden(): assert sums.hidden(10) == 2
            @pytest.mark.aot
            def test_never(): raise AssertionError
            """,
        "tests/hall/test_area.py": """\
            from kvjax.hall.area import area
            from kvjax.room.sums import add
            def test_area(): assert area(1, 1) == 1
            def test_add(): assert add(2, 3) == 5
            """,
    }
    root = tmp_path / "tree"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return root


def test_a_sample_is_stratified_and_follows_its_seed(tree):
    places = sample.points(tree)
    assert {name: len(found) for name, found in places.items()} == {".": 4, "hall": 2, "room": 8}

    def draw(seed, count=8):
        return sample.draw(places, tree, count=count, least=2, seed=seed)

    by_folder = [sample.folder(mutant["file"]) for mutant in draw("a")]
    assert sorted(by_folder) == [".", ".", ".", "hall", "hall", *5 * ["room"]]
    assert draw("a") == draw("a") != draw("b")
    everything = draw("a", 100)
    assert len({(m["file"], m["start"], m["end"], m["after"]) for m in everything}) == 14


@pytest.mark.slow
def test_detection_by_tests(tree, tmp_path):
    file = tmp_path / "sample.json"
    command = [sys.executable, "-m", "tests.mutants", str(file), f"--tree={tree}", "--run"]
    environment = os.environ | dict(KVJAX_CACHE=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))

    def run(*more):
        options = dict(env=environment, cwd=ROOT, capture_output=True, text=True)
        return subprocess.run([*command, "--count=100", *more], **options)

    def who():
        return {
            (m["before"], m["after"], m["lines"][0]): (
                m.get("noticed_by"),
                m.get("test", "").rpartition("::")[2],
            )
            for m in json.loads(file.read_text())["mutants"]
        }

    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    first = run()
    assert first.returncode == 0, first.stderr
    found = who()
    hidden = ("/", "*", 7)
    assert found["+", "-", 3] == ("quick", "test_add")
    assert found["3", "4", 1][0] == "folder"  # at import
    assert found["2", "3", 3] == ("folder", "test_main")  # in another process
    assert found[hidden] == (None, "")
    second = run("--slow")
    assert who()[hidden] == ("slow", "test_hidden")
    assert who() == found | {key: value for key, value in who().items() if value[0] == "slow"}
    assert "test_" not in second.stdout  # lines were known
    assert {path: path.read_bytes() for path in before} == before


def test_the_table():
    def asked(*stages, **more):
        return dict(operator="constant", asked=list(stages)) | more

    room = dict(file="kvjax/room/x.py")
    content = dict(
        places={".": 10, "room": 30},
        mutants=[
            room | asked("folder", noticed_by="folder"),
            room | asked("folder", "quick", noticed_by="quick"),
            room | asked("folder", "quick", "slow", noticed_by="slow"),
            room | asked("folder", "quick", "slow"),
            room | asked("folder", "quick", equivalent="a bound that is never reached"),
            dict(file="kvjax/x.py") | asked("folder", "quick", noticed_by="quick"),
        ],
    )
    lines = table.table(content).splitlines()
    assert lines[2].startswith("| . | 1 | 0 | 0 of 1: 0 % (0 to 79) | 1 of 1: 100 % (21 to 100) |")
    assert lines[3] == (
        "| room | 5 | 1 "
        "| 1 of 4: 25 % (5 to 70) | 2 of 4: 50 % (15 to 85) | 3 of 4: 75 % (30 to 95) |"
    )
    assert lines[-1] == "By the places of each folder: folder 18.8 %, quick 62.5 %, slow 81.2 %."
