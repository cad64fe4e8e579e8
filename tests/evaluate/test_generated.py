"""GSM8K and HumanEval: judging answers, and calculator calls."""

from unittest import mock

import pytest

from kvjax import sandbox
from kvjax.conversation.questions import CodeProblem, MathProblem
from kvjax.evaluate import generated
from kvjax.evaluate.generated import AnswerOptions, Verdict
from kvjax.evaluate.letters import prompt_hash
from tests.evaluate import oracles
from tests.evaluate.oracles import Oracle

SUMS = [
    MathProblem("How many?", "Half is 16/2=<<16/2=8>>8.\nThen 8+10=<<8+10=18>>18 in all.\n#### 18"),
    MathProblem("How much?", "He owes 3*1,000=<<3*1000=3000>>$3,000.\n#### 3,000"),
    MathProblem("And now?", "Nothing is left.\n#### -5"),
]
REFERENCE = {item.question: item.answer for item in SUMS}


def _ask(text, **options):
    return generated.ask(Oracle(text=text), SUMS, range(len(SUMS)), AnswerOptions(**options))


def _question(prompt: str) -> str:
    return prompt.split("<|user_start|>")[1].split("<|user_end|>")[0]


def _reference(prompt: str) -> list[int]:
    return oracles.reference_tokens(REFERENCE[_question(prompt)])


def test_calculator_results_are_forced():
    rows = _ask(_reference)
    assert all(row["right"] for row in rows)
    assert rows[0]["calls"] == [["16/2", "8.0"], ["8+10", "18"]]
    assert rows[0]["text"] == (
        "Half is 16/2=<|python_start|>16/2<|python_end|><|output_start|>8.0<|output_end|>8.\n"
        "Then 8+10=<|python_start|>8+10<|python_end|><|output_start|>18<|output_end|>18 in all.\n"
        "#### 18"
    )
    assert "calls" not in rows[2] and "unfinished" not in rows[0]


def test_the_calculator_can_write_as_the_data_set_does():
    rows = _ask(_reference, calculator="dataset")
    assert rows[0]["calls"] == [["16/2", "8"], ["8+10", "18"]]


def test_calculator_results_count_towards_the_limit():
    rows = _ask(_reference, num_tokens=30)
    assert [row["tokens"] for row in rows][:2] == [30, 30]
    assert rows[0]["unfinished"] and not rows[0]["right"] and rows[0]["reason"] == "no marker"
    assert "8.0" in rows[0]["text"]


@pytest.mark.parametrize(
    ("text", "right", "reason"),
    [
        ("#### 18", True, ""),
        ("so #### 18\n#### 19", True, ""),  # the first counts
        ("#### 19\n#### 18", False, "19 for 18"),
        ("#### 18.", False, "18. for 18"),
        ("#### 18.0", False, "18.0 for 18"),
        ("#### 1,8", True, ""),
        ("####18", False, "no marker"),
        ("18", False, "no marker"),
        ("#### $18", False, "no marker"),
        ("#### -18", False, "-18 for 18"),
        ("#### 18 apples", True, ""),
    ],
)
def test_sum_verdicts(text, right, reason):
    assert generated.sum_verdict(text, SUMS[0]) == Verdict(right, reason)


PROBLEMS = [
    CodeProblem(
        f"HumanEval/{i}",
        f"# sums\nimport math\n\nfrom typing import List\n\n\ndef {name}(x, y):\n    '''Adds.'''\n",
        name,
        "    return x + y\n",
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n",
    )
    for i, name in enumerate(["add", "plus"])
]


def _judge(programs):
    box = sandbox.open("auto")
    found = box.judge_all([sandbox.Problem(*program) for program in programs])
    return [Verdict(verdict.passed, verdict.reason, verdict.retried) for verdict in found]


def _programs(text, mode="chat", judge=_judge):
    options = AnswerOptions(judge=judge, mode=mode)
    return generated.ask(Oracle(text=text), PROBLEMS, [0, 1], options)


def test_programs_are_run_and_judged():
    def answer(prompt):
        problem = next(p for p in PROBLEMS if p.prompt in prompt)
        body = problem.canonical_solution if problem.entry_point == "add" else "    return 3\n"
        definition = f"def {problem.entry_point}(x, y):\n{body}"
        return oracles.answer_tokens(
            f"Here it is:\n```python\n{definition}```\nDone. ```not this```"
        )

    one, other = _programs(answer)
    assert one["right"] and "reason" not in one
    assert not other["right"] and "AssertionError" in other["reason"]


def test_helpers_of_the_prompt():
    """Tests of HumanEval/32, 38 and 50 call a helper that the prompt defines."""
    prompt = (
        'import math\n\ndef twice(x):\n    return math.prod((x, 2))\n\ndef half(x):\n    """."""\n'
    )
    calls = "candidate(twice(3)) == 3 and candidate(twice(5)) == 5 and half(0) == 0"
    item = CodeProblem("t/2", prompt, "half", "", f"def check(candidate):\n    assert {calls}\n")
    tests = [generated.test(item, helpers) for helpers in generated.HELPERS]
    for program, *right in (
        (prompt + "    return x // 2", True, True),
        (prompt + "    return x // 3", False, False),
        ("def half(x): return x // 2", False, True),
        ("def twice(x): return x\ndef half(x): return x", True, False),
    ):
        found = _judge([(program, test, item.entry_point) for test in tests])
        assert [verdict.right for verdict in found] == right, program
    with pytest.raises(sandbox.SandboxError, match="prompt of half is not Python: "):
        generated.test(item._replace(prompt="def twice(x:"), "prompt")


def test_completion_mode():
    """A prompt begins with BOS; in a chat the names of special tokens are counted."""
    judged, continuation = [], "    return x + y\n\n"

    def completion(prompt):
        assert prompt.startswith("<|bos|># sums")
        return oracles.answer_tokens(f"{continuation}\ndef more():\n    bad syntax")

    def judge(programs):
        judged.extend(programs)
        return [Verdict(True), Verdict(False, "wrong", True)]

    rows = _programs(completion, mode="completion", judge=judge)
    assert judged == [
        (item.prompt + continuation, item.test, item.entry_point) for item in PROBLEMS
    ]
    encoded = [oracles.TOKENIZER.encode(item.prompt) for item in PROBLEMS]
    same = dict(text=continuation, tokens=len(f"{continuation}\ndef"))
    for i, verdict in enumerate(
        (dict(right=True), dict(right=False, reason="wrong", retried=True))
    ):
        prompt = prompt_hash([oracles.TOKENIZER.bos_id, *encoded[i]])
        assert rows[i] == dict(index=i, prompt=prompt) | same | verdict

    made = mock.patch.object(Oracle, "answers", autospec=True, side_effect=Oracle.answers)
    with made as asked:
        _programs(completion, mode="completion", judge=judge)
    assert asked.call_args.kwargs["is_continued"] is True  # the first indent is kept

    ids = [oracles.DIALOGUE.specials.python_start, *oracles.answer_tokens("def f(): pass")]
    rows = _programs(lambda prompt: list(ids), judge=judge)
    assert [row["specials"] for row in rows] == [True, True]
    rows = _programs(lambda prompt: oracles.answer_tokens("x"), judge=judge)
    assert not any("specials" in row for row in rows)


def test_programs_from_answers():
    item = PROBLEMS[0]
    assert generated.leading_imports(item.prompt) == "import math\nfrom typing import List"
    assert generated.code("say\n```python\nx = 1\n```\n```\ny\n```") == "x = 1"
    assert generated.code("```\nx = 1\n```") == "x = 1"
    assert generated.code("  x = 1 \n") == "x = 1"
    assert generated.program(item, "x = 1") == "import math\nfrom typing import List\n\nx = 1\n"
    assert generated.completed(item, "    pass") == item.prompt + "    pass"
