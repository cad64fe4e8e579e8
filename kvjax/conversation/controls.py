"""Finds the control tokens of a dialogue: tokens that its chat template writes and no message may.

They are the special tokens of the tokenizer, and other tokens that end a text or that the template
writes: added tokens that are not flagged special, and entries of the vocabulary that no text is
encoded as, which is how a file has a control token that it calls an ordinary one. Blanks, names of
roles and words of the vocabulary are text, whatever a template writes; an added token that is a
word is a control token where the template writes it around messages.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import re
from typing import NamedTuple

from kvjax.data.tokenizer import Tokenizer

# Contents of messages, by which a rendering is taken apart.
_SYSTEM, _QUESTION, _ANSWER, _NEXT = (f"kvjax{name}" for name in "SQAN")
_ROLES = ("system", "user", "assistant")
_CONTENT = "|".join((_SYSTEM, _QUESTION, _ANSWER, _NEXT))
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
      missing: named tokens that the template writes and the tokenizer does not have.
    """

    names: frozenset[str]
    end: str | None
    inner: frozenset[str]
    missing: frozenset[str]


def find(
    tokenizer: Tokenizer, template: str, literals: str, named: Iterable[str], render: Render
) -> Controls:
    """Returns the control tokens of a template, found in its text and by rendering.

    Args:
      template: in Jinja.
      literals: the texts in it.
      named: special tokens that its model's files name.
    """
    contents = dict(system=_SYSTEM, user=_QUESTION, assistant=_ANSWER)
    system, user, answer = (dict(role=role, content=text) for role, text in contents.items())
    ended = render([user, answer], False)
    going_on = render([user, answer, user | dict(content=_NEXT)], True)
    told = render([system, user], True)
    rendered = "\n".join((ended, going_on, told))
    text = f"{rendered}\n{literals}"
    around = (told, *(each.partition(_QUESTION)[2] for each in (ended, going_on)))
    vocabulary, added = tokenizer.vocabulary(), tokenizer.added_tokens()
    ends = {name for name, i in vocabulary.items() if i in tokenizer.ends}
    names = tokenizer.controls | _added(added, "\n".join(around), text, ends)
    names |= {
        name
        for name in {name for name in vocabulary if name in rendered}.union(ends) - added.keys()
        if not _WORDS.fullmatch(name) and tokenizer.encode(name) != [vocabulary[name]]
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
        missing=frozenset(name for name in named if name in text and name not in vocabulary),
    )


def _added(added: Iterable[str], around: str, text: str, ends: Collection[str]) -> set[str]:
    """Returns the added tokens that are control tokens.

    Args:
      around: what is rendered around messages, but for a default system message.
      text: that, and all else that the template may write.
      ends: tokens that end a text.
    """
    written = re.findall(any_of({*added, *_ROLES}), re.sub(_CONTENT, "\n", around))
    meant = {name for name in added if name in written or name in ends}
    meant = {name for name in meant if not name.isspace() and name.lower() not in _ROLES}
    return meant | {name for name in added if name in text and not _WORDS.fullmatch(name)}


def _is_looked_for(name: str, template: str) -> bool:
    """True if a template looks for a token in texts, as by .split('</think>') or 'x' in y."""
    quoted = f"['\"]{re.escape(name)}['\"]"
    return bool(re.search(rf"\.\w+\(\s*{quoted}|{quoted}\s+(not\s+)?in\b", template))


def any_of(names: Iterable[str]) -> str:
    """Returns a regular expression for the longest name present, or for nothing without names."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
