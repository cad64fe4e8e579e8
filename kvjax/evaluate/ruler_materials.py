"""Materials of RULER's prompts: words, a running text, and files of questions on documents."""

import collections
from collections.abc import Iterator, Sequence
import functools
import itertools
import re
from typing import NamedTuple

from kvjax.data import records, sources
from kvjax.data.config import DataConfig
from kvjax.evaluate.ruler_tasks import Documents, Question
from kvjax.foundation import json_text, runtime
from kvjax.foundation.configuration import checked
from kvjax.foundation.errors import DataError, MissingDataError, UserError

EMBEDDED = "embedded"
PUBLISHED = dict(  # the published file of each task
    qa_1="dev-v2.0.json of SQuAD 2.0", qa_2="hotpot_dev_distractor_v1.json of HotpotQA"
)
_WORD = re.compile(r"\b[a-z]{4,9}\b")


@functools.cache
def words() -> tuple[str, ...]:
    """Returns, sorted, the lower-case words of 4 to 9 letters that the embedded books repeat."""
    counts = collections.Counter()
    for piece in sources.pieces(DataConfig(source=EMBEDDED), "train"):
        counts.update(_WORD.findall(piece.text))
    return tuple(sorted(word for word, count in counts.items() if count > 1))


def running_text(source: str, count: int) -> list[str]:
    """Returns the first `count` words of a text, which is repeated if it has fewer.

    Args:
      source: as config.data.source.

    Raises:
      UserError: there is no such source, or it has no words.
    """
    try:
        text_words = list(itertools.islice(_words_of(source), count))
    except UserError as error:
        raise UserError(str(error).replace("config.data.source", "--ruler_text")) from error
    if not text_words:
        raise UserError(f"--ruler_text = {source!r}: has no words: give another text")
    return list(itertools.islice(itertools.cycle(text_words), count))


def _words_of(source: str) -> Iterator[str]:
    for piece in sources.pieces(DataConfig(source=source), "train"):
        yield from piece.text.split()


def documents(task: str, file: str) -> Documents:
    """Reads a file of questions on documents, as SQuAD or HotpotQA publish it.

    Raises:
      MissingDataError: there is no such file.
      DataError: the file has another form.
    """
    where = f"--file=ruler_{task} = {file!r}"
    path = runtime.path(f"--file=ruler_{task}", file)
    if not path.is_file():
        raise MissingDataError(f"{where}: is not a file; give {PUBLISHED[task]}")
    try:
        content = json_text.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: is not JSON: {error}; give {PUBLISHED[task]}") from error
    try:
        questions = list(_squad(content) if task == "qa_1" else _hotpot(content))
        if not questions:
            raise ValueError("no questions")
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        raise DataError(
            f"{where}: has another form ({type(error).__name__}: {error}); give {PUBLISHED[task]}"
        ) from error
    return _numbered(questions, records.digest([path]))


class _FileQuestion(NamedTuple):
    """A question in a file, with the texts of its own documents and of related ones."""

    text: str
    answers: tuple[str, ...]
    own: list[str]
    related: list[str]


def _squad(content) -> Iterator[_FileQuestion]:
    """Yields answerable questions, each on one paragraph; the article's others are related."""
    for article in content["data"]:
        paragraphs = article["paragraphs"]
        texts = [checked(paragraph["context"], str, "context") for paragraph in paragraphs]
        for paragraph, own in zip(paragraphs, texts, strict=True):
            for entry in paragraph["qas"]:
                if not entry.get("is_impossible"):
                    answers = [answer["text"] for answer in entry["answers"]]
                    others = [text for text in texts if text != own]
                    yield _question(entry["question"], answers, [own], others)


def _hotpot(content) -> Iterator[_FileQuestion]:
    """Yields the questions, each on ten documents of its own."""
    for entry in content:
        own = [f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]]
        yield _question(entry["question"], [entry["answer"]], own, [])


def _question(text, answers: list, own: list[str], related: list[str]) -> _FileQuestion:
    answers = checked(answers, tuple[str, ...], "answers")
    if not all(answers) or not answers:
        raise ValueError("a question without an answer")
    return _FileQuestion(checked(text, str, "question"), answers, own, related)


def _numbered(questions: Sequence[_FileQuestion], digest: str) -> Documents:
    """Replaces documents by numbers in a list of the distinct documents of all questions."""
    texts = sorted({text for each in questions for text in (*each.own, *each.related)})
    number = {text: i for i, text in enumerate(texts)}
    numbered = [
        Question(
            each.text,
            each.answers,
            tuple(number[text] for text in dict.fromkeys(each.own)),
            tuple(number[text] for text in dict.fromkeys(each.related)),
        )
        for each in questions
    ]
    return Documents(numbered, texts, digest)
