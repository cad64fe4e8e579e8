"""GSM8K and HumanEval: a text is written, greedily, and judged.

GSM8K is right if the number after the first `#### ` is the reference's, compared as text once its
commas are gone: `18.0` for 18 is wrong, and so is no marker. HumanEval is right if the program runs
through the set's test, in a sandbox (see `kvjax.sandbox`).

The tests of HumanEval/32, 38 and 50 call a helper of the prompt (`poly`, `encode_cyclic`,
`encode_shift`). In the original they call the program's, so that a program passes which redefines
the helper to fit a wrong answer. HELPERS chooses: the program's, or the prompt's own.
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
MODES = ("chat", "completion")  # of HumanEval
HELPERS = ("program", "prompt")  # whose helpers HumanEval's tests call
# What ends a function that a model completes (Chen et al., 2021).
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_FENCED = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


class Verdict(NamedTuple):
    """What judging an answer gave: whether it is right, why not, whether it was judged twice."""

    right: bool
    reason: str = ""
    is_retried: bool = False


# Programs, tests and entry points to verdicts.
Judge = Callable[[Sequence[tuple[str, str, str]]], list[Verdict]]


class AnswerOptions(NamedTuple):
    """How a model is asked."""

    num_tokens: int = NUM_TOKENS
    calculator: str = "nanochat"  # see `kvjax.conversation.calculator`
    mode: str = MODES[0]  # of HumanEval
    helpers: str = HELPERS[0]  # of HumanEval
    judge: Judge | None = None  # of programs


def ask(
    model: BenchmarkModel,
    items: Sequence[MathProblem | CodeProblem],
    indices: Sequence[int],
    answers: AnswerOptions,
) -> list[dict[str, Any]]:
    """The rows of some questions, a batch at most."""
    prompts = [prompt(model, items[i], answers.mode) for i in indices]
    is_completed = isinstance(items[indices[0]], CodeProblem) and answers.mode == "completion"
    options = dict(num_tokens=answers.num_tokens, mode=answers.calculator)
    if is_completed:
        options |= dict(stop=STOP)
    found = model.answers([ids for ids, _ in prompts], **options)
    rows = [
        _row(i, *prompt, answer) for i, prompt, answer in zip(indices, prompts, found, strict=True)
    ]
    chosen = [items[i] for i in indices]
    if isinstance(chosen[0], CodeProblem):
        specials = set(model.dialogue.specials or ())
        for row, answer in zip(rows, found, strict=True):
            if specials & set(answer.ids):  # their names stand in the program
                row["specials"] = True
    if isinstance(chosen[0], MathProblem):
        verdicts = [sum_verdict(row["text"], item) for row, item in zip(rows, chosen, strict=True)]
    else:
        make = completed if is_completed else program
        programs = [
            (make(item, row["text"]), test(item, answers.helpers), item.entry_point)
            for row, item in zip(rows, chosen, strict=True)
        ]
        verdicts = answers.judge(programs)
    for row, (right, reason, is_retried) in zip(rows, verdicts, strict=True):
        row |= dict(right=right, **(dict(reason=reason) if reason else {}))
        row |= dict(retried=True) if is_retried else {}
    return rows


def prompt(
    model: BenchmarkModel, item: MathProblem | CodeProblem, mode: str
) -> tuple[list[int], bool]:
    """A question's token ids, and whether it was cut."""
    text = item.question if isinstance(item, MathProblem) else item.prompt
    if isinstance(item, CodeProblem) and mode == "completion":
        return [model.tokenizer.bos_id, *model.tokenizer.encode(text)], False
    rendered = model.dialogue.prompt([dict(role="user", content=text)])
    return rendered.ids, rendered.is_cut


def _row(index: int, ids: list[int], is_cut: bool, answer: Answer) -> dict:
    return dict(
        index=index,
        prompt=prompt_hash(ids),
        text=answer.text,
        tokens=len(answer.ids),
        **(dict(calls=[list(call) for call in answer.calls]) if answer.calls else {}),
        **({} if answer.is_ended else dict(unfinished=True)),
        **(dict(cut=True) if is_cut else {}),
    )


# -- GSM8K -----------------------------------------------------------------------------------------


def number(text: str) -> str | None:
    """What stands after the first marker, without commas; None without one."""
    found = _NUMBER.search(text)
    return found[1].strip().replace(",", "") if found else None


def sum_verdict(text: str, item: MathProblem) -> Verdict:
    said, reference = number(text), number(item.answer)
    if said is None:
        return Verdict(False, "no marker")
    return Verdict(said == reference, "" if said == reference else f"{said} for {reference}")


# -- HumanEval -------------------------------------------------------------------------------------


def program(item: CodeProblem, text: str) -> str:
    """The imports that a prompt begins with, and the code of an answer."""
    return f"{leading_imports(item.prompt)}\n\n{code(text)}\n"


def completed(item: CodeProblem, text: str) -> str:
    """A prompt and what follows it."""
    return item.prompt + text


def test(item: CodeProblem, helpers: str) -> str:
    """Returns the test of a problem; with the prompt's helpers before it, if these are chosen.

    Raises:
      SandboxError: test or prompt are not Python.
    """
    asked = set(sandbox.asked_names(sandbox.Problem("", item.test, item.entry_point)))
    if helpers == "program" or not asked - {item.entry_point}:
        return item.test
    try:
        tree = ast.parse(item.prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise sandbox.SandboxError(
            f"prompt of {item.entry_point} is not Python: {error}"
        ) from error
    own = [node for node in tree.body if getattr(node, "name", "") != item.entry_point]
    return f"{ast.unparse(ast.Module(own, []))}\n\n{item.test}"


def code(text: str) -> str:
    """The first fenced block of an answer, else all of it."""
    found = _FENCED.search(text)
    return (found[1] if found else text).strip()


def leading_imports(prompt: str) -> str:
    """Lines of import before the first that is neither import, comment nor blank."""
    found = []
    for line in map(str.strip, prompt.split("\n")):
        if line.startswith(("import ", "from ")):
            found.append(line)
        elif line and not line.startswith("#"):
            break
    return "\n".join(found)
