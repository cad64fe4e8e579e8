"""500 conversations that are made up: letters and small sums, for a laptop and for tests.

Half ask which of four words is of some kind, and are answered by a letter; half ask for a sum,
which is answered with a call of the calculator. A tiny model learns both in minutes.
"""

import random

from kvjax.conversation import questions
from kvjax.conversation.questions import Choices

COUNT = 500
KINDS = {
    "an animal": ("horse", "lion", "sheep", "dove"),
    "a metal": ("gold", "iron", "brass", "silver"),
    "a tree": ("oak", "cedar", "palm", "olive"),
    "a king": ("Saul", "David", "Lear", "Henry"),
}
LETTERS = tuple("ABCD")


def conversations(count: int = COUNT, seed: int = 0) -> list[dict]:
    """So many of them, the same ones for a seed; letters and sums in turn."""
    rng = random.Random(seed)
    return [letter(rng) if i % 2 == 0 else sum_of_two(rng) for i in range(count)]


def letter(rng: random.Random) -> dict:
    """One word of each kind in any order; which is of one kind?"""
    kinds = rng.sample(sorted(KINDS), len(LETTERS))
    asked = rng.randrange(len(LETTERS))
    choices = tuple(rng.choice(KINDS[kind]) for kind in kinds)
    question = f"Which word is {kinds[asked]}?"
    found = Choices(question, choices, LETTERS, LETTERS[asked])
    return questions.conversation(questions.multiple_choice(found), found.answer)


def sum_of_two(rng: random.Random) -> dict:
    """Two numbers of one digit, as GSM8K writes it."""
    a, b = rng.randrange(10), rng.randrange(10)
    parts = questions.calls(f"<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}")
    return questions.conversation(f"What is {a} + {b}?", parts)
