"""The tool that plants bugs: who notices is told, and the tree is as before."""

import pytest

from tests import mutations


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
    "new, found",
    [
        ("a + b + 1", dict(caught_by="make test", test="tests/room/test_sums.py::test_zeros")),
        ("a * b", dict(caught_by="make test-all", test="tests/room/test_sums.py::test_sums")),
        ("b + a", dict(caught_by=None)),
    ],
)
def test_who_notices(tree, new, found):
    before = (tree / "kvjax/room/sums.py").read_text()
    mutation = dict(file="kvjax/room/sums.py", old="a + b", new=new, bug="")
    assert mutations._try(tree, mutation, workers=0) == found
    assert (tree / "kvjax/room/sums.py").read_text() == before


def test_a_text_that_is_not_there_once_is_refused(tree):
    mutation = dict(file="kvjax/room/sums.py", old="a", new="b", bug="")
    with pytest.raises(SystemExit, match="'a' does not occur once: update it"):
        mutations._try(tree, mutation)


def test_the_table():
    found = [dict(caught_by="make test"), dict(caught_by=None), {}]
    text = mutations.table([dict(file="kvjax/x.py", bug="wrong") | f for f in found])
    assert text.splitlines()[2:] == [
        "| x.py | wrong | make test |",
        "| x.py | wrong | **nobody** |",
        "",
        "make test: 1, **nobody**: 1",
    ]
