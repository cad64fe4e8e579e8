"""Parses rows of published sets: MMLU, ARC, GSM8K, HumanEval, SmolTalk.

Each function takes a row as stored in the set's files, and its file and row number for messages.
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


def multiple_choice(item: MultipleChoice) -> str:
    """Returns the user's message (nanochat's format).

    The letter follows its choice without a blank, so that it is the same token in question and
    answer.
    """
    lines = [f"- {c}={letter}" for c, letter in zip(item.choices, item.letters, strict=True)]
    return "\n".join(
        [
            f"Multiple Choice question: {item.question}",
            *lines,
            "",
            "Respond only with the letter of the correct answer.",
        ]
    )


def conversation(question: str, answer) -> dict:
    """Returns a conversation of one question and its answer, which is text or a list of parts."""
    messages = [dict(role="user", content=question), dict(role="assistant", content=answer)]
    return dict(messages=messages)


def mmlu(row: Mapping, place: str) -> MultipleChoice:
    """Parses a row of MMLU: question, choices, answer (0 to 3, or a letter), maybe inside `train`.

    Choices may be numbers or empty.
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
    """Parses a line of MMLU's original CSV: question, four choices, letter."""
    if len(cells) != 6:
        raise DataError(f"{place}: has {len(cells)} cells; question, A, B, C, D and letter are 6")
    question, *choices, answer = cells
    return mmlu(dict(question=question, choices=choices, answer=answer), place)


def arc(row: Mapping, place: str) -> MultipleChoice:
    """Parses a row of ARC, Parquet or original JSON; letters are the row's own, A-E or 1-5."""
    question, answer = _keys(row, ("question", "answerKey"), place)
    if isinstance(question, Mapping):  # {stem, choices: [{text, label}]}
        stem, choices = _keys(question, ("stem", "choices"), place)
        pairs = [_keys(choice, ("text", "label"), place) for choice in _list(choices, place)]
        texts, labels = zip(*pairs, strict=True) if pairs else ((), ())
    else:
        stem = question
        (choices,) = _keys(row, ("choices",), place)
        texts, labels = _keys(choices, ("text", "label"), place)
    texts, labels = _choices(texts, place), _as_texts(_list(labels, place), place)
    if len(texts) != len(labels) or str(answer) not in labels:
        raise DataError(
            f"{place}: answerKey = {answer!r} is not among the labels {list(labels)} of "
            f"{len(texts)} choices"
        )
    return MultipleChoice(_text(stem, "question", place), texts, labels, str(answer))


class MathProblem(NamedTuple):
    """A question of GSM8K and its reference answer."""

    question: str
    answer: str


def gsm8k_question(row: Mapping, place: str) -> MathProblem:
    """Parses a row of GSM8K for evaluation."""
    question, answer = _keys(row, ("question", "answer"), place)
    return MathProblem(_text(question, "question", place), _text(answer, "answer", place))


def gsm8k(row: Mapping, place: str) -> dict:
    """Parses a row of GSM8K as a conversation; <<...>> become calculator calls."""
    question, answer = gsm8k_question(row, place)
    return conversation(question, calls(answer))


def calls(answer: str) -> list[dict]:
    """Splits an answer of GSM8K into text and calculator calls.

    In <<expression=output>>, the text before the last = is the expression; output may be missing.
    The text after a call repeats the result.
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
    """Parses a row of SmolTalk: keeps `messages` only."""
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
    """Parses a row of HumanEval."""
    values = _keys(row, CodeProblem._fields, place)
    return CodeProblem(
        *(_text(v, k, place) for k, v in zip(CodeProblem._fields, values, strict=True))
    )


def _keys(row, keys: Sequence[str], place: str) -> list:
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: must be an object with {', '.join(keys)}, not {row!r:.80}")
    if lacking := [key for key in keys if key not in row]:
        raise DataError(f"{place}: has no {', '.join(lacking)}; it has {', '.join(map(str, row))}")
    return [row[key] for key in keys]


def _choices(choices, place: str) -> tuple[str, ...]:
    choices = _list(choices, place)
    if not 2 <= len(choices) <= len(_LETTERS):
        raise DataError(f"{place}: has {len(choices)} choices; must be 2 to {len(_LETTERS)}")
    return _as_texts(choices, place)


def _list(value, place: str) -> Sequence:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise DataError(f"{place}: choices must be a list, not {value!r:.80}")
    return value


def _as_texts(values: Sequence, place: str) -> tuple[str, ...]:
    """Converts choices or labels to text; raises for null, NaN and objects."""
    for value in values:
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if not (isinstance(value, str) or number):
            raise DataError(f"{place}: a choice must be text or a number, not {value!r:.80}")
    return tuple(map(str, values))


def _text(value, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be text, not {type(value).__name__}")
    return value
