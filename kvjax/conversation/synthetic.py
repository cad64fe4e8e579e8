"""500 synthetic conversations, for a laptop and for tests: letters and small sums.

Half ask which of four words is an animal, answered by a letter; half ask for a sum, answered with a
calculator call. A tiny model learns both in one or two minutes.
"""

import random

from kvjax.conversation import questions
from kvjax.conversation.questions import MultipleChoice

COUNT = 500
ANIMALS = ("horse", "lion", "sheep", "dove")
OTHERS = ("gold", "iron", "brass", "silver", "oak", "cedar", "palm", "olive", "Saul", "David")
LETTERS = tuple("ABCD")


def conversations(count: int = COUNT, seed: int = 0) -> list[dict]:
    """Returns `count` conversations, letters and sums in turn; deterministic in the seed."""
    rng = random.Random(seed)
    return [letter(rng) if i % 2 == 0 else sum_of_two(rng) for i in range(count)]


def letter(rng: random.Random) -> dict:
    """Returns a question with one animal among three other words."""
    words, place = rng.sample(OTHERS, len(LETTERS) - 1), rng.randrange(len(LETTERS))
    words.insert(place, rng.choice(ANIMALS))
    item = MultipleChoice("Which word is an animal?", tuple(words), LETTERS, LETTERS[place])
    return questions.conversation(questions.multiple_choice(item), item.answer)


def sum_of_two(rng: random.Random) -> dict:
    """Returns a sum of two one-digit numbers, in GSM8K's format."""
    a, b = rng.randrange(10), rng.randrange(10)
    parts = questions.calls(f"<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}")
    return questions.conversation(f"What is {a} + {b}?", parts)
