"""Oracles: models with known answers, behind the interface of a real one."""

from collections.abc import Callable, Sequence

import numpy as np

from kvjax.conversation import questions
from kvjax.conversation.dialogue import NativeDialogue
from kvjax.conversation.questions import MultipleChoice
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.decoding import answers as answers_lib

TOKENIZER = tokenizer_lib.byte_tokenizer().with_specials(tokenizer_lib.CONVERSATION_SPECIALS)
DIALOGUE = NativeDialogue(TOKENIZER, "a test", limit=1 << 20)

# Number of rows of each set in the fixture `data`.
COUNTS = dict(arc_easy=5, arc_challenge=4, mmlu=8, gsm8k=5, humaneval=3, core_x=6, core_y=4)


class Oracle:
    """A model whose answers are a function of the question.

    Args:
      letter: function of a prompt's text and its number of letters to the letters' logits.
      text: function of a prompt's text to the answer's tokens, without the calculator's results.
    """

    tokenizer, dialogue, positions, batch = TOKENIZER, DIALOGUE, None, 4

    def __init__(self, letter: Callable | None = None, text: Callable | None = None):
        self._letter, self._text = letter, text

    def choices(self, prompts, candidates) -> list[np.ndarray]:
        return [
            np.asarray(self._letter(TOKENIZER.decode(ids), len(letters)), np.float32)
            for ids, letters in zip(prompts, candidates, strict=True)
        ]

    def answers(self, prompts, **options):
        scripts = [self._text(TOKENIZER.decode(ids)) for ids in prompts]
        return answers_lib.answers(Scripted(scripts), DIALOGUE, prompts, **options)


class Scripted:
    """A generator of scripted tokens; forced tokens come before them."""

    def __init__(self, scripts: Sequence[Sequence[int]]):
        self._scripts = scripts

    def start(self, prompts, *, num_tokens, stop_tokens, **_):
        return _Generation(self._scripts, num_tokens, set(stop_tokens))


class _Generation:
    timing = None

    def __init__(self, scripts, num_tokens, ends):
        self._scripts = [list(script) for script in scripts]
        self._forced = [[] for _ in scripts]
        self._num_tokens, self._ends = num_tokens, ends
        self.tokens = [[] for _ in scripts]
        self.finished = [False] * len(scripts)

    def __iter__(self):
        for _ in range(self._num_tokens):
            new = []
            for b, script in enumerate(self._scripts):
                if self.finished[b]:
                    continue
                is_forced = bool(self._forced[b])
                token = self._forced[b].pop(0) if is_forced else script.pop(0)
                if token in self._ends and not is_forced:
                    self.finished[b] = True
                else:
                    self.tokens[b].append(token)
                    new.append((b, token))
            yield new
            if all(self.finished):
                return

    def force(self, b, tokens):
        self._forced[b] += tokens

    def finish(self, b):
        self.finished[b] = True


def answer_tokens(text: str) -> list[int]:
    """Returns the tokens of an answer: its text and the end token."""
    return [*TOKENIZER.encode(text), DIALOGUE.specials.assistant_end]


def reference_tokens(answer: str) -> list[int]:
    """Returns a GSM8K reference with its calculator calls, without their results."""
    s, ids = DIALOGUE.specials, []
    for part in questions.calls(answer):
        tokens = TOKENIZER.encode(part["text"])
        if part["type"] == "text":
            ids += tokens
        elif part["type"] == "python":
            ids += [s.python_start, *tokens, s.python_end]
    return [*ids, s.assistant_end]


def prompt_text(item: MultipleChoice) -> str:
    """Returns the prompt's text for a multiple-choice question, as an oracle reads it."""
    ids = DIALOGUE.prompt([dict(role="user", content=questions.multiple_choice(item))]).ids
    return TOKENIZER.decode(ids)


def row(name: str, i: int) -> dict:
    """Returns row i of a set, in the form of its JSON lines."""
    question = f"{name} {i}?"
    if name == "mmlu":
        return dict(question=question, choices=["a", "b", "c", "d"], answer=i % 4)
    if name == "gsm8k":
        return dict(question=question, answer=f"So it is.\n#### {i}")
    if name == "humaneval":
        tests = f"def check(candidate):\n    assert candidate() == {i}\n"
        prompt = dict(task_id=f"x/{i}", prompt=question, canonical_solution="")
        return prompt | dict(entry_point="f", test=tests)
    if name.startswith("core"):
        return dict(query=question, choices=["yes", "no"], gold=i % 2)
    choices = dict(text=["a", "b", "c"], label=["1", "2", "3"])
    return dict(id=str(i), question=question, choices=choices, answerKey=str(i % 3 + 1))
