"""500 conversations that are made up: letters and small sums, for a laptop and for tests.

Half ask which of four words is an animal, and are answered by a letter; half ask for a sum, which
is answered with a call of the calculator. A tiny model learns both in a minute or two.
"""

import random

from kvjax.conversation import questions
from kvjax.conversation.questions import MultipleChoice

COUNT = 500
ANIMALS = ("horse", "lion", "sheep", "dove")
OTHERS = ("gold", "iron", "brass", "silver", "oak", "cedar", "palm", "olive", "Saul", "David")
LETTERS = tuple("ABCD")


def conversations(count: int = COUNT, seed: int = 0) -> list[dict]:
    """So many of them, the same ones for a seed; letters and sums in turn."""
    rng = random.Random(seed)
    return [letter(rng) if i % 2 == 0 else sum_of_two(rng) for i in range(count)]


def letter(rng: random.Random) -> dict:
    """Three words of other kinds, and an animal at any place between them."""
    words, place = rng.sample(OTHERS, len(LETTERS) - 1), rng.randrange(len(LETTERS))
    words.insert(place, rng.choice(ANIMALS))
    found = MultipleChoice("Which word is an animal?", tuple(words), LETTERS, LETTERS[place])
    return questions.conversation(questions.multiple_choice(found), found.answer)


def sum_of_two(rng: random.Random) -> dict:
    """Two numbers of one digit, as GSM8K writes it."""
    a, b = rng.randrange(10), rng.randrange(10)
    parts = questions.calls(f"<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}")
    return questions.conversation(f"What is {a} + {b}?", parts)
