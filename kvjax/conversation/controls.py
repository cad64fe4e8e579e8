"""Finds a chat template's control tokens, which only the template may write, and never a message.

Control tokens are the tokenizer's special tokens, tokens that end a text, and other tokens that the
template writes: added tokens without the special flag, and vocabulary entries that no text is
encoded as (some published files flag a control token as ordinary). Blanks, role names and words of
the vocabulary are text even if the template writes them. An added token that is a word is a control
token if the template writes it around messages.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import re
from typing import NamedTuple

from kvjax.data.tokenizer import Tokenizer

# Placeholder contents, which locate the messages in a rendering.
_SYSTEM, _QUESTION, _ANSWER, _NEXT = (f"kvjax{name}" for name in "SQAN")
_ROLES = ("system", "user", "assistant")
_CONTENT = "|".join((_SYSTEM, _QUESTION, _ANSWER, _NEXT))
_WORDS = re.compile(r"[\w\s]*")

# Renders messages, with or without a generation prompt; "" if the template refuses them.
Render = Callable[[Sequence[Mapping], bool], str]


class Controls(NamedTuple):
    """The control tokens of a chat template, as texts."""

    names: frozenset[str]  # all control tokens
    end: str | None  # the token that ends an assistant's turn
    # Tokens of the answer format, such as </think>: never between turns, and either without the
    # special flag, or searched for by the template to split an assistant's message.
    in_answers: frozenset[str]
    missing: frozenset[str]  # named tokens that the template writes and the tokenizer lacks


def find(
    tokenizer: Tokenizer, template: str, literals: str, named: Iterable[str], render: Render
) -> Controls:
    """Returns the control tokens of a template, found in its text and in trial renderings.

    Args:
      template: Jinja source.
      literals: the template's literal texts.
      named: special tokens that the model's files name.
    """
    contents = dict(system=_SYSTEM, user=_QUESTION, assistant=_ANSWER)
    system, user, answer = (dict(role=role, content=text) for role, text in contents.items())
    finished = render([user, answer], False)
    continued = render([user, answer, user | dict(content=_NEXT)], True)
    with_system = render([system, user], True)
    rendered = "\n".join((finished, continued, with_system))
    text = f"{rendered}\n{literals}"
    # Templates may write a default system message: ignore what precedes the question.
    around = (with_system, *(each.partition(_QUESTION)[2] for each in (finished, continued)))
    vocabulary, added = tokenizer.vocabulary(), tokenizer.added_tokens()
    ends = {name for name, i in vocabulary.items() if i in tokenizer.ends}
    names = tokenizer.controls | _added(added, "\n".join(around), text, ends)
    entries = ends.union(name for name in vocabulary if name in rendered) - added.keys()
    names |= {
        name
        for name in entries
        if not _WORDS.fullmatch(name) and tokenizer.encode(name, "inside") != [vocabulary[name]]
    }
    pattern = re.compile(any_of(names))
    before_answer, _, rest = continued.partition(_ANSWER)
    before_question, _, before_answer = before_answer.partition(_QUESTION)
    after_answer = pattern.findall(finished.partition(_ANSWER)[2])
    after_answer += pattern.findall(rest.partition(_NEXT)[0])
    # Tokens between turns; other tokens may belong to the format of an answer.
    between_turns = {*after_answer, *pattern.findall(before_question)}
    between_turns |= set(pattern.findall(with_system.partition(_QUESTION)[0]))
    searched = {name for name in names if _is_searched(name, template)} - between_turns
    between_turns |= set(pattern.findall(before_answer)) - searched
    unflagged = {name for name in names if name in added and not added[name].special}
    return Controls(
        names,
        end=after_answer[0] if after_answer else None,
        in_answers=frozenset((unflagged | searched) - between_turns),
        missing=frozenset(name for name in named if name in text and name not in vocabulary),
    )


def _added(added: Iterable[str], around: str, text: str, ends: Collection[str]) -> set[str]:
    """Returns the added tokens that are control tokens.

    Args:
      around: rendered text around messages, without a default system message.
      text: all text that the template may write.
      ends: tokens that end a text.
    """
    written = re.findall(any_of({*added, *_ROLES}), re.sub(_CONTENT, "\n", around))
    controls = {name for name in added if name in written or name in ends}
    controls = {name for name in controls if not name.isspace() and name.lower() not in _ROLES}
    return controls | {name for name in added if name in text and not _WORDS.fullmatch(name)}


def _is_searched(name: str, template: str) -> bool:
    """Returns True if a template searches texts for a token: .split('</think>'), 'x' in y."""
    quoted = f"['\"]{re.escape(name)}['\"]"
    return bool(re.search(rf"\.\w+\(\s*{quoted}|{quoted}\s+(not\s+)?in\b", template))


def any_of(names: Iterable[str]) -> str:
    """Returns a regular expression for the longest matching name; it never matches if empty."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
