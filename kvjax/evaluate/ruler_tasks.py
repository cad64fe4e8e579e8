"""RULER's thirteen tasks (Hsieh et al., arXiv 2404.06654): prompts of any size and their answers.

Kinds, sizes and numbers of generated tokens are those of NVIDIA/RULER's scripts/synthetic.yaml; the
sentences are our own. A haystack's size is counted in units that depend on the task: lines of
noise, words of running text, distracting needles, words of a list, or documents.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import random
import re
import string
from typing import NamedTuple
import uuid

from kvjax.foundation.errors import UserError

NOISE = (
    "Rain falls on the hills. The river runs to the sea. A bell rings at noon. We walk on. "
    "The road goes round again."
)
_DEPTHS = 40  # equidistant depths of a running text, the start and the end among them
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")
_LONG = 4096  # from this length on, cwe's words are repeated more often


class Sample(NamedTuple):
    """A question: the user's message, the start of the answer, and the texts expected in it."""

    text: str
    prefix: str
    answers: tuple[str, ...]


class Question(NamedTuple):
    """A question on documents.

    Attributes:
      own: numbers of the question's documents, which are always shown.
      related: numbers of further documents of the same article, which are added before others.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


class Documents(NamedTuple):
    """A data set of questions and its distinct documents."""

    questions: Sequence[Question]
    documents: Sequence[str]
    digest: str  # of the file


@dataclasses.dataclass(frozen=True)
class Materials:
    """Materials and sizes of prompts.

    Attributes:
      length: tokens of prompt and answer.
      words: distinct words for keys and lists.
      running_text: words of a text, at least `length`.
      documents: documents and questions of the tasks that have a file, by task.
    """

    length: int
    words: Sequence[str]
    running_text: Sequence[str]
    documents: Mapping[str, Documents]


# (materials, random generator, index, size) -> question `index` with a haystack of `size` units.
# The generator is seeded anew for each call, so that equal arguments give equal questions.
Make = Callable[[Materials, random.Random, int, int], Sample]


@dataclasses.dataclass(frozen=True)
class RulerTask:
    """A task of RULER.

    Attributes:
      num_tokens: tokens to generate.
      least: smallest size of a haystack.
      any_answer: one expected answer suffices; False: the score is the share that is found.
    """

    name: str
    num_tokens: int
    make: Make
    least: int
    any_answer: bool = False


# -- needles in a haystack -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Needles:
    """A task's haystack (noise, text or needles), and kinds and numbers of keys and values."""

    haystack: str
    key: str = "word"
    value: str = "number"
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1

    @property
    def count(self) -> int:
        return self.num_keys * self.num_values

    def make(self, materials: Materials, rng: random.Random, index: int, size: int) -> Sample:
        del index
        distractors = size if self.haystack == "needles" else 0
        keys = _distinct(self.key, self.num_keys + distractors, rng, materials.words)
        values = _distinct(self.value, self.count + distractors, rng, materials.words)
        owners = [key for key in keys[: self.num_keys] for _ in range(self.num_values)]
        owners += keys[self.num_keys :]
        needles = [
            f"A secret {self.value} for {owner} is {value}."
            for owner, value in zip(owners, values, strict=True)
        ]
        queried = rng.sample(keys[: self.num_keys], self.num_queries)
        answers = [
            v for key in queried for v, owner in zip(values, owners, strict=True) if owner == key
        ]
        hidden = needles[: self.count]
        rng.shuffle(hidden)
        if self.haystack == "text":
            context = _inside_text(hidden, materials.running_text[:size], rng)
        else:
            lines = needles[self.count :] if distractors else [NOISE] * size
            context = "\n".join(_between(hidden, lines, rng))
        return self._asked(context, queried, answers)

    def _asked(self, context: str, queried: Sequence[str], answers: Sequence[str]) -> Sample:
        key = " and ".join(filter(None, [", ".join(queried[:-1]), queried[-1]]))
        if len(answers) == 1:
            secret, them, verb = f"secret {self.value}", "it", "is"
            opening = f"In the following text a {secret} is hidden."
        else:
            secret, them, verb = f"secret {self.value}s", "them", "are"
            opening = f"In the following text {secret} are hidden."
        opening += f" Remember {them}: you will be asked for {them} at the end."
        question = f"Which {secret} does the text above give for {key}?"
        prefix = f" The {secret} that the text gives for {key} {verb}"
        return Sample(f"{opening}\n{context}\n{question}", prefix, tuple(answers))


def _distinct(kind: str, count: int, rng: random.Random, words: Sequence[str]) -> list[str]:
    """Returns distinct keys or values: numbers of seven digits, hyphenated words, or UUIDs."""
    draw = dict(
        number=lambda: str(rng.randrange(10**6, 10**7)),
        word=lambda: "-".join(rng.sample(words, 2)),
        UUID=lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    )[kind]
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def _between(needles: Sequence[str], lines: Sequence[str], rng: random.Random) -> list[str]:
    """Returns the lines with needles inserted, in order, before different random lines."""
    places = sorted(rng.sample(range(len(lines)), len(needles)))
    by_place = dict(zip(places, needles, strict=True))
    return [
        text
        for place, line in enumerate(lines)
        for text in ((by_place[place], line) if place in by_place else (line,))
    ]


def _inside_text(needles: Sequence[str], words: Sequence[str], rng: random.Random) -> str:
    """Returns a text with each needle between two sentences, at different depths."""
    sentences = _SENTENCE_END.split(" ".join(words))
    depths = sorted(rng.sample(range(_DEPTHS), len(needles)))
    parts, start = [], 0
    for depth, needle in zip(depths, needles, strict=True):
        stop = len(sentences) * depth // (_DEPTHS - 1)
        parts += [*sentences[start:stop], needle]
        start = stop
    return " ".join([*parts, *sentences[start:]])


# -- variables, words ------------------------------------------------------------------------------

_HOPS = 4
_EXAMPLE_LINES = 12  # of noise in the example of vt: about 500 tokens, as in RULER


def _variables(materials: Materials, rng: random.Random, index: int, size: int) -> Sample:
    """A chain of assignments in noise, after an example with its answer."""
    del materials, index
    example, sample = _chain(rng, 3, _EXAMPLE_LINES), _chain(rng, 5, size)
    answer = " ".join(example.answers)
    return sample._replace(text=f"{example.text}{example.prefix} {answer}\n\n{sample.text}")


def _chain(rng: random.Random, letters: int, size: int) -> Sample:
    """Returns a question on one chain whose variables have names of `letters` letters."""
    names: dict[str, None] = {}
    while len(names) <= _HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    variables, value = tuple(names), str(rng.randrange(10_000, 100_000))
    sources = [value, *(f"VAR {name}" for name in variables[:-1])]
    assignments = [f"VAR {name} = {of}" for name, of in zip(variables, sources, strict=True)]
    context = "\n".join(_between(assignments, [NOISE] * size, rng))
    return Sample(
        "The following text hides assignments to variables, some of the value of another variable. "
        f"Keep track of them.\n\n{context}\n"
        f"Question: Which variables have the value {value} in the text above?",
        f" Answer: In the text above, {len(variables)} variables have the value {value}:",
        variables,
    )


_COMMON = 10


def _common_words(materials: Materials, rng: random.Random, index: int, size: int) -> Sample:
    """A numbered list in which ten words are more common, after an example with its answer."""
    del index
    if _COMMON + size > len(materials.words):
        raise UserError(
            f"ruler_cwe: a list for {materials.length:,} tokens needs more than the "
            f"{len(materials.words):,} words that there are: lower --ruler_lengths, or leave cwe "
            "out of --tasks"
        )
    is_long = materials.length >= _LONG
    example = _list(materials.words, rng, *((30, 10, 3) if is_long else (10, 3, 1)))
    sample = _list(materials.words, rng, size, *((30, 3) if is_long else (6, 1)))
    answer = _numbered(example.answers)
    return sample._replace(text=f"{example.text}{example.prefix} {answer}\n{sample.text}")


def _list(words: Sequence[str], rng: random.Random, others: int, often: int, seldom: int) -> Sample:
    """Returns a question on a list of ten words `often` times and others `seldom` times each."""
    drawn = rng.sample(words, _COMMON + others)
    common = drawn[:_COMMON]
    listed = common * often + drawn[_COMMON:] * seldom
    rng.shuffle(listed)
    return Sample(
        "The numbered list below has some words more often than others. Remember those that it has "
        f"most often.\n{_numbered(listed)}\n"
        f"Question: Which {_COMMON} words are the most common ones of the list above?",
        f" Answer: The {_COMMON} most common words of the list are:",
        tuple(common),
    )


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


_CODED = 3  # number of most frequent words to find
_ZETA_2 = math.pi**2 / 6
LEAST_CODED = 74  # from this size on, the fourth word is rarer than the third


def _coded_words(materials: Materials, rng: random.Random, index: int, size: int) -> Sample:
    """Coded words by Zipf's law with exponent 2; the most frequent one, dots, does not count."""
    del index
    count = max(_CODED + 2, (materials.length - FWE_TOKENS) // 50)
    names: dict[str, None] = {"...": None}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    text = [
        name for rank, name in enumerate(names, 1) for _ in range(int(size / (rank**2 * _ZETA_2)))
    ]
    rng.shuffle(text)
    return Sample(
        "The following text is in coded words. Keep count of each, and find the three that occur "
        f"most often. {' '.join(text)}\n"
        "Question: Which three coded words occur most often in the text above? Leave out the dots "
        "'...', and explain nothing.",
        " Answer: In the text above, the three coded words that occur most often are:",
        tuple(names)[1 : 1 + _CODED],
    )


# -- questions on documents ------------------------------------------------------------------------


def _on_documents(
    materials: Materials, rng: random.Random, index: int, size: int, *, name: str
) -> Sample:
    """A question on its own documents and `size` others, in random order."""
    questions, documents, _ = materials.documents[name]
    question = questions[index]
    related = rng.sample(question.related, len(question.related))
    known = {*question.own, *related}
    others = [i for i in range(len(documents)) if i not in known]
    rng.shuffle(others)
    more = [*related, *others] or list(question.own)
    more *= -(-size // len(more))  # a small set is repeated
    shown = [*question.own, *more[:size]]
    rng.shuffle(shown)
    context = "\n\n".join(f"Document {i}:\n{documents[d]}" for i, d in enumerate(shown, 1))
    return Sample(
        f"Answer the question by the documents below. Write only the answer.\n\n{context}\n\n"
        "Answer the question by the documents above. Write only the answer.\n\n"
        f"Question: {question.text}",
        " Answer:",
        question.answers,
    )


# -- all tasks -------------------------------------------------------------------------------------

_NEEDLES = dict(
    niah_single_1=_Needles("noise"),
    niah_single_2=_Needles("text"),
    niah_single_3=_Needles("text", value="UUID"),
    niah_multikey_1=_Needles("text", num_keys=4),
    niah_multikey_2=_Needles("needles"),
    niah_multikey_3=_Needles("needles", key="UUID", value="UUID"),
    niah_multivalue=_Needles("text", num_values=4),
    niah_multiquery=_Needles("text", num_keys=4, num_queries=4),
)
DOCUMENT_TASKS = ("qa_1", "qa_2")  # SQuAD, HotpotQA
FWE_TOKENS = 50

TASKS: Mapping[str, RulerTask] = {
    task.name: task
    for task in (
        *(RulerTask(name, 128, n.make, n.count) for name, n in _NEEDLES.items()),
        RulerTask("vt", 30, _variables, _HOPS + 1),
        RulerTask("cwe", 120, _common_words, 1),
        RulerTask("fwe", FWE_TOKENS, _coded_words, LEAST_CODED),
        *(
            RulerTask(name, 32, functools.partial(_on_documents, name=name), 0, any_answer=True)
            for name in DOCUMENT_TASKS
        ),
    )
}
