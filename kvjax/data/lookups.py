"""Synthetic documents in which facts are stated twice, to calibrate heads that retrieve.

A model's second statement of a fact is predictable only by attention to the first. Running text has
few such tokens, so a conversion that is calibrated on books alone loses retrieval long before it
loses perplexity (experiments/LOG.md, 2026-12-01).
"""

from collections.abc import Iterator
import math
import random
import re

COUNT = 512
_FACTS = (
    "The code of {name} is {value}.",
    "{name}: {value}",
    "{name} = {value}",
    "Whoever asks for {name} is given {value}.",
    "In the register, {name} stands beside {value}.",
)
_VALUES = ("number", "words", "hexadecimal")
_PASSAGE_CHARACTERS = (80, 8000)
_WORD = re.compile(r"\b[a-z]{4,9}\b")


def documents(text: str, seed: int = 0, count: int = COUNT) -> Iterator[str]:
    """Yields documents of facts between passages of a book, then the same facts in another order.

    A document has 2 to 16 facts, each a name of two words and a number, two words or hexadecimal
    digits; wording and kind of value are the document's. Half of the documents have no passages;
    the others have 80 to 8,000 characters of them, evenly on a logarithmic scale.

    Args:
      text: text of the passages and words.
      seed: the documents are deterministic in it.
    """
    rng = random.Random(seed)
    words = sorted(set(_WORD.findall(text)))
    for _ in range(count):
        yield _document(rng, text, words)


def _document(rng: random.Random, text: str, words: list[str]) -> str:
    fact, kind = rng.choice(_FACTS), rng.choice(_VALUES)
    facts = [
        fact.format(name=_two_words(rng, words), value=_value(rng, kind, words))
        for _ in range(rng.randint(2, 16))
    ]
    lines = facts.copy()
    if rng.random() < 0.5:
        low, high = map(math.log, _PASSAGE_CHARACTERS)
        share = int(math.exp(rng.uniform(low, high))) // len(facts)
        lines = [line for each in facts for line in (each, _passage(rng, text, share))]
    rng.shuffle(facts)
    return "\n".join([*lines, *facts])


def _value(rng: random.Random, kind: str, words: list[str]) -> str:
    if kind == "words":
        return _two_words(rng, words)
    if kind == "number":
        return str(rng.randrange(10**3, 10 ** rng.randint(4, 8)))
    return f"{rng.getrandbits(64):016x}"


def _two_words(rng: random.Random, words: list[str]) -> str:
    return " ".join(rng.sample(words, 2))


def _passage(rng: random.Random, text: str, length: int) -> str:
    """Returns about `length` characters that begin at the start of a line."""
    start = text.index("\n", rng.randrange(len(text) - length - 1000)) + 1
    return text[start : start + length].strip()
