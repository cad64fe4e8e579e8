"""Finds the control tokens of a dialogue: tokens that its chat template writes and no message may.

They are the special tokens of the tokenizer, and other tokens that end a text or stand in the
template or in what it renders: added tokens that are not flagged special, and entries of the
vocabulary that no text is encoded as, which is how a file has a control token that it calls an
ordinary one. Words and blanks are text, whatever a template contains.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import re
from typing import NamedTuple

from kvjax.data.tokenizer import Tokenizer

# Contents of messages, by which a rendering is taken apart.
_SYSTEM, _QUESTION, _ANSWER, _NEXT = (f"kvjax{name}" for name in "SQAN")
_WORDS = re.compile(r"[\w\s]*")

# Renders messages, with an opened answer or without; "" for what the template refuses.
Render = Callable[[Sequence[Mapping], bool], str]


class Controls(NamedTuple):
    """The control tokens of a chat template, by their texts.

    Attributes:
      names: all of them.
      end: the one that follows an assistant's text: its turn ends there; None: there is none.
      inner: tokens of an answer's own format, as </think>: not between turns, and not flagged
        special unless the template looks for them, to take an assistant's message apart.
      lost: named tokens that the template writes and the tokenizer does not have.
    """

    names: frozenset[str]
    end: str | None
    inner: frozenset[str]
    lost: frozenset[str]


def find(tokenizer: Tokenizer, template: str, named: Iterable[str], render: Render) -> Controls:
    """Returns the control tokens of a template, found in its text and by rendering.

    Args:
      template: in Jinja.
      named: special tokens that its model's files name.
    """
    contents = dict(system=_SYSTEM, user=_QUESTION, assistant=_ANSWER)
    system, user, answer = (dict(role=role, content=text) for role, text in contents.items())
    ended = render([user, answer], False)
    going_on = render([user, answer, user | dict(content=_NEXT)], True)
    told = render([system, user], True)
    text = "\n".join((template, ended, going_on, told))
    vocabulary, added = tokenizer.vocabulary(), tokenizer.added_tokens()
    there = {name: i for name, i in vocabulary.items() if name in text or i in tokenizer.ends}
    names = tokenizer.controls | {
        name
        for name, i in there.items()
        if not _WORDS.fullmatch(name) and (name in added or tokenizer.encode(name) != [i])
    }
    pattern = re.compile(any_of(names))
    between = pattern.findall(going_on.partition(_ANSWER)[2].partition(_NEXT)[0])
    after = [*pattern.findall(ended.partition(_ANSWER)[2]), *between]
    before = [text.partition(_ANSWER)[0].partition(_QUESTION) for text in (told, going_on)]
    frame = {name for text, _, _ in before for name in pattern.findall(text)}.union(after)
    looked_for = {name for name in names if _is_looked_for(name, template)} - frame
    frame |= set(pattern.findall(before[1][2])) - looked_for
    unflagged = {name for name in names if name in added and not added[name].special}
    return Controls(
        names,
        end=after[0] if after else None,
        inner=frozenset((unflagged | looked_for) - frame),
        lost=frozenset(name for name in named if name in text and name not in vocabulary),
    )


def _is_looked_for(name: str, template: str) -> bool:
    """True if a template looks for a token in texts, as by .split('</think>') or 'x' in y."""
    quoted = f"['\"]{re.escape(name)}['\"]"
    return bool(re.search(rf"\.\w+\(\s*{quoted}|{quoted}\s+(not\s+)?in\b", template))


def any_of(names: Iterable[str]) -> str:
    """Returns a regular expression for the longest name present, or for nothing without names."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
