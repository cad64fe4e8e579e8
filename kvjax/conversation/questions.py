"""Rows of published sets as conversations: MMLU, ARC, GSM8K, HumanEval, SmolTalk.

Each function takes a row as its files have it, and a place for messages (a file and a row).
"""

from collections.abc import Mapping, Sequence
import math
import re
from typing import NamedTuple

from kvjax.foundation.errors import DataError

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CALL = re.compile(r"(<<[^>]+>>)")


class MultipleChoice(NamedTuple):
    """A multiple-choice question."""

    question: str
    choices: tuple[str, ...]
    letters: tuple[str, ...]
    answer: str  # one of the letters


def multiple_choice(asked: MultipleChoice) -> str:
    """The user's message.

    The letter follows its choice, with no blank before it: so it is the same token in the question
    and as the answer.
    """
    lines = [f"- {c}={letter}" for c, letter in zip(asked.choices, asked.letters, strict=True)]
    return "\n".join(
        [
            f"Multiple Choice question: {asked.question}",
            *lines,
            "",
            "Respond only with the letter of the correct answer.",
        ]
    )


def conversation(question: str, answer) -> dict:
    """A question of the user's, and the assistant's answer: text, or parts."""
    asked = dict(role="user", content=question)
    return dict(messages=[asked, dict(role="assistant", content=answer)])


def mmlu(row: Mapping, place: str) -> MultipleChoice:
    """A row of MMLU: question, choices, answer (0 to 3, or a letter); or wrapped in `train`.

    MultipleChoice may be numbers or empty text: they are written as they are.
    """
    if set(row) == {"train"} and isinstance(row["train"], Mapping):
        row = row["train"]
    question, choices, answer = _keys(row, ("question", "choices", "answer"), place)
    choices = _choices(choices, place)
    letters = tuple(_LETTERS[: len(choices)])
    if isinstance(answer, str) and answer.strip() in letters:
        answer = letters.index(answer.strip())
    if type(answer) is not int or answer not in range(len(choices)):
        raise DataError(
            f"{place}: answer = {answer!r} must be 0 to {len(choices) - 1}, or a letter"
        )
    return MultipleChoice(_text(question, "question", place), choices, letters, letters[answer])


def mmlu_csv(cells: Sequence[str], place: str) -> MultipleChoice:
    """A line of MMLU's original CSV: question, four choices, letter."""
    if len(cells) != 6:
        raise DataError(f"{place}: has {len(cells)} cells; question, A, B, C, D and letter are 6")
    question, *choices, answer = cells
    return mmlu(dict(question=question, choices=choices, answer=answer), place)


def arc(row: Mapping, place: str) -> MultipleChoice:
    """A row of ARC, as Parquet has it or as the original: letters are the row's own, A-E or 1-5."""
    question, answer = _keys(row, ("question", "answerKey"), place)
    if isinstance(question, Mapping):  # {stem, choices: [{text, label}]}
        stem, found = _keys(question, ("stem", "choices"), place)
        choices = [_keys(choice, ("text", "label"), place) for choice in _list(found, place)]
        texts, labels = zip(*choices, strict=True) if choices else ((), ())
    else:
        stem = question
        (found,) = _keys(row, ("choices",), place)
        texts, labels = _keys(found, ("text", "label"), place)
    texts, labels = _choices(texts, place), _written(_list(labels, place), place)
    if len(texts) != len(labels) or str(answer) not in labels:
        raise DataError(
            f"{place}: answerKey = {answer!r} is not among the labels {list(labels)} of "
            f"{len(texts)} choices"
        )
    return MultipleChoice(_text(stem, "question", place), texts, labels, str(answer))


def gsm8k(row: Mapping, place: str) -> dict:
    """A row of GSM8K: question and answer, whose <<...>> are calls of the calculator."""
    question, answer = _keys(row, ("question", "answer"), place)
    parts = calls(_text(answer, "answer", place))
    return conversation(_text(question, "question", place), parts)


class MathProblem(NamedTuple):
    """A question of GSM8K and the text that answers it."""

    question: str
    answer: str


def gsm8k_question(row: Mapping, place: str) -> MathProblem:
    """A row of GSM8K that is asked, its answer as it is written."""
    question, answer = _keys(row, ("question", "answer"), place)
    return MathProblem(_text(question, "question", place), _text(answer, "answer", place))


def calls(answer: str) -> list[dict]:
    """The parts of an answer of GSM8K.

    Inside <<...>> what stands before the last = is asked, what follows is the output (empty if
    there is no =). The text after a call repeats the result.
    """
    parts = []
    for piece in _CALL.split(answer):
        if _CALL.fullmatch(piece):
            expression, equals, output = piece[2:-2].rpartition("=")
            if not equals:
                expression, output = output, ""
            parts.append(dict(type="python", text=expression))
            parts.append(dict(type="python_output", text=output))
        else:
            parts.append(dict(type="text", text=piece))
    return parts


def smoltalk(row: Mapping, place: str) -> dict:
    """A row of SmolTalk: it has `messages`; what else it has is left out."""
    (messages,) = _keys(row, ("messages",), place)
    return dict(messages=messages)


class CodeProblem(NamedTuple):
    """A problem of HumanEval."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


def humaneval(row: Mapping, place: str) -> CodeProblem:
    """A row of HumanEval."""
    values = _keys(row, CodeProblem._fields, place)
    return CodeProblem(
        *(_text(v, k, place) for k, v in zip(CodeProblem._fields, values, strict=True))
    )


def _keys(row, keys: Sequence[str], place: str) -> list:
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: must be an object with {', '.join(keys)}, not {row!r:.80}")
    if lacking := [key for key in keys if key not in row]:
        raise DataError(f"{place}: lacks {', '.join(lacking)}; it has {', '.join(map(str, row))}")
    return [row[key] for key in keys]


def _choices(choices, place: str) -> tuple[str, ...]:
    choices = _list(choices, place)
    if not 2 <= len(choices) <= len(_LETTERS):
        raise DataError(f"{place}: has {len(choices)} choices; 2 to {len(_LETTERS)} can be asked")
    return _written(choices, place)


def _list(value, place: str) -> Sequence:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise DataError(f"{place}: choices must be a list, not {value!r:.80}")
    return value


def _written(values: Sequence, place: str) -> tuple[str, ...]:
    """MultipleChoice or their labels as text; null, NaN and objects are none."""
    for value in values:
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if not (isinstance(value, str) or number):
            raise DataError(f"{place}: a choice must be text or a number, not {value!r:.80}")
    return tuple(map(str, values))


def _text(value, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be text, not {type(value).__name__}")
    return value
