"""GSM8K and HumanEval: answers are generated greedily and judged.

An answer to GSM8K is right if the number after its first `#### ` equals the reference's, as text
without commas: `18.0` for 18 is wrong, and so is an answer without the marker. An answer to
HumanEval is right if the program passes the problem's test, in a sandbox (`kvjax.sandbox`).

The tests of HumanEval/32, 38 and 50 call a helper function that the prompt defines (`poly`,
`encode_cyclic`, `encode_shift`). In the original they call the program's definition, so that a
program can pass by redefining the helper to fit a wrong answer. HELPERS selects whose definition
they call.
"""

import ast
from collections.abc import Callable, Sequence
import re
from typing import Any, NamedTuple

from kvjax import sandbox
from kvjax.conversation.questions import CodeProblem, MathProblem
from kvjax.decoding.answers import Answer
from kvjax.evaluate.letters import prompt_hash
from kvjax.evaluate.model import BenchmarkModel

NUM_TOKENS = 512
MODES = ("chat", "completion")  # formats of HumanEval's prompts
HELPERS = ("program", "prompt")
# Stop sequences of a completed function (Chen et al., 2021).
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_FENCED = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


class Verdict(NamedTuple):
    """The judgement of an answer: right or wrong, why, and whether it was judged twice."""

    right: bool
    reason: str = ""
    is_retried: bool = False


# Judges (program, test, entry point) triples.
Judge = Callable[[Sequence[tuple[str, str, str]]], list[Verdict]]


class AnswerOptions(NamedTuple):
    """Options of generating and judging answers."""

    num_tokens: int = NUM_TOKENS
    calculator: str = "nanochat"  # see `kvjax.conversation.calculator`
    # The others are for HumanEval.
    mode: str = MODES[0]
    helpers: str = HELPERS[0]
    judge: Judge | None = None


def ask(
    model: BenchmarkModel,
    items: Sequence[MathProblem | CodeProblem],
    indices: Sequence[int],
    options: AnswerOptions,
) -> list[dict[str, Any]]:
    """Generates and judges the answers to some questions, at most one batch; returns their rows."""
    prompts = [prompt(model, items[i], options.mode) for i in indices]
    is_completed = isinstance(items[indices[0]], CodeProblem) and options.mode == "completion"
    generation = dict(num_tokens=options.num_tokens, mode=options.calculator)
    if is_completed:
        generation |= dict(stop=STOP, is_continued=True)
    answers = model.answers([ids for ids, _ in prompts], **generation)
    rows = [
        _row(i, *prompt, answer)
        for i, prompt, answer in zip(indices, prompts, answers, strict=True)
    ]
    chosen = [items[i] for i in indices]
    if isinstance(chosen[0], CodeProblem):
        specials = set(model.dialogue.specials or ())
        for row, answer in zip(rows, answers, strict=True):
            if specials & set(answer.ids):  # the program's text has their names
                row["specials"] = True
    if isinstance(chosen[0], MathProblem):
        verdicts = [sum_verdict(row["text"], item) for row, item in zip(rows, chosen, strict=True)]
    else:
        make_program = completed if is_completed else program
        programs = [
            (make_program(item, row["text"]), test(item, options.helpers), item.entry_point)
            for row, item in zip(rows, chosen, strict=True)
        ]
        verdicts = options.judge(programs)
    for row, (right, reason, is_retried) in zip(rows, verdicts, strict=True):
        row["right"] = right
        if reason:
            row["reason"] = reason
        if is_retried:
            row["retried"] = True
    return rows


def prompt(
    model: BenchmarkModel, item: MathProblem | CodeProblem, mode: str
) -> tuple[list[int], bool]:
    """Returns a question's token ids, and True if it was cut."""
    text = item.question if isinstance(item, MathProblem) else item.prompt
    if isinstance(item, CodeProblem) and mode == "completion":
        return [model.tokenizer.bos_id, *model.tokenizer.encode(text)], False
    rendered = model.dialogue.prompt([dict(role="user", content=text)])
    return rendered.ids, rendered.is_cut


def _row(index: int, ids: list[int], is_cut: bool, answer: Answer) -> dict:
    row = {
        "index": index,
        "prompt": prompt_hash(ids),
        "text": answer.text,
        "tokens": len(answer.ids),
    }
    if answer.calls:
        row["calls"] = [list(call) for call in answer.calls]
    if not answer.is_ended:
        row["unfinished"] = True
    if is_cut:
        row["cut"] = True
    return row


# -- GSM8K -----------------------------------------------------------------------------------------


def number(text: str) -> str | None:
    """Returns the number after the first marker, without commas; None if there is none."""
    match = _NUMBER.search(text)
    return match[1].strip().replace(",", "") if match else None


def sum_verdict(text: str, item: MathProblem) -> Verdict:
    """Judges an answer to a question of GSM8K."""
    answer, reference = number(text), number(item.answer)
    if answer is None:
        return Verdict(False, "no marker")
    return Verdict(answer == reference, "" if answer == reference else f"{answer} for {reference}")


# -- HumanEval -------------------------------------------------------------------------------------


def program(item: CodeProblem, text: str) -> str:
    """Returns the program of a chat answer: the prompt's imports, then the answer's code."""
    return f"{leading_imports(item.prompt)}\n\n{code(text)}\n"


def completed(item: CodeProblem, text: str) -> str:
    """Returns the program of a completion: prompt and continuation."""
    return item.prompt + text


def test(item: CodeProblem, helpers: str) -> str:
    """Returns the test of a problem, preceded by the prompt's definitions if HELPERS selects them.

    Raises:
      SandboxError: the test or the prompt is not valid Python.
    """
    called = set(sandbox.called_names(sandbox.Problem("", item.test, item.entry_point)))
    if helpers == "program" or not called - {item.entry_point}:
        return item.test
    try:
        tree = ast.parse(item.prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise sandbox.SandboxError(
            f"prompt of {item.entry_point} is not Python: {error}"
        ) from error
    definitions = [node for node in tree.body if getattr(node, "name", "") != item.entry_point]
    return f"{ast.unparse(ast.Module(definitions, []))}\n\n{item.test}"


def code(text: str) -> str:
    """Returns the first fenced block of an answer; all of it without a fence."""
    match = _FENCED.search(text)
    return (match[1] if match else text).strip()


def leading_imports(prompt: str) -> str:
    """Returns the import lines before the first line that is not an import, a comment or blank."""
    lines = []
    for line in map(str.strip, prompt.split("\n")):
        if line.startswith(("import ", "from ")):
            lines.append(line)
        elif line and not line.startswith("#"):
            break
    return "\n".join(lines)
