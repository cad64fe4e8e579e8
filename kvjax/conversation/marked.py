"""Marks control tokens in rendered text, so that their names in messages stay ordinary text.

A chat template renders a conversation to one text, in which a control token that the template wrote
and one that a user typed look alike. So names in messages are replaced by placeholders before
rendering; names in the result are then the template's and get a mark, and the placeholders are
replaced by the names.

Marks and placeholders use Unicode noncharacters, which are escaped in messages in the same way.
"""

from collections.abc import Mapping
import functools
import re

from kvjax.conversation.controls import any_of
from kvjax.data.tokenizer import Tokenizer

_MARK, _END = "\ufdd0", "\ufdd1"
_DIGITS = "".join(map(chr, range(0xFDD2, 0xFDDC)))
_HIDDEN = f"{_MARK}[{_DIGITS}]+{_END}"


class Marks:
    """Escapes messages, marks renderings and encodes marked texts, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        flags, names = tokenizer.added_tokens(), tokenizer.controls
        beginnings = {name[:i] for name in names for i in range(1, len(name))}
        self._tokenizer, self._beginnings = tokenizer, beginnings
        self._longest = max(map(len, beginnings), default=0)
        self._hidden = (*names, _MARK, _END, *_DIGITS, *{text[0] for text in beginnings})
        self._numbers = {text: number for number, text in enumerate(self._hidden)}
        self._to_hide = re.compile(any_of((*names, _MARK, _END, *_DIGITS)))
        self._made = re.compile(f"({_HIDDEN})|{any_of(names)}")
        self._ids = {name: tokenizer.special(name) for name in names}
        # Added tokens with lstrip or rstrip absorb adjacent blanks, as in transformers.
        pieces = (
            (r"\s*" if name in flags and flags[name].lstrip else "")
            + f"{_MARK}({re.escape(name)})"
            + (r"\s*" if name in flags and flags[name].rstrip else "")
            for name in sorted(names, key=len, reverse=True)
        )
        self._meant = re.compile("|".join((f"{_MARK}{_MARK}", *pieces)))

    def hide(self, value, kept: frozenset[str] = frozenset()):
        """Replaces the control tokens' names in all texts of a message by placeholders.

        A prefix of a name at the end of a text is replaced too: the template may complete it.

        Args:
          kept: names that stay.
        """
        if isinstance(value, str):
            return self._end_hidden(self._names_hidden(value, kept))
        if isinstance(value, Mapping):
            return {self._names_hidden(key): self.hide(v, kept) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(part, kept) for part in value]
        return value

    def _names_hidden(self, text, kept: frozenset[str] = frozenset()):
        def hidden(match: re.Match) -> str:
            return match[0] if match[0] in kept else self._stand_in(match[0])

        return self._to_hide.sub(hidden, text) if isinstance(text, str) else text

    def _end_hidden(self, text: str) -> str:
        start = max(0, len(text) - self._longest)
        return text[:start] + "".join(
            self._stand_in(text[i]) if text[i:] in self._beginnings else text[i]
            for i in range(start, len(text))
        )

    def _stand_in(self, text: str) -> str:
        digits = str(self._numbers[text])
        return f"{_MARK}{''.join(_DIGITS[int(digit)] for digit in digits)}{_END}"

    def of_rendered(self, text: str) -> str:
        """Marks the names in a text rendered from hidden messages; restores placeholders."""

        def made(match: re.Match) -> str:
            if not match[1]:
                return special(match[0])
            number = int("".join(str(_DIGITS.index(digit)) for digit in match[1][1:-1]))
            return plain(self._hidden[number])

        return self._made.sub(made, text)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a marked text; text between control tokens is encoded separately."""
        ids, stretch, at = [], "", 0

        def end_stretch() -> None:
            if stretch:
                ids.extend(self._tokenizer.encode(stretch))

        for match in self._meant.finditer(text):
            stretch += text[at : match.start()]
            at = match.end()
            if not match.lastindex:
                stretch += _MARK
                continue
            end_stretch()
            stretch = ""
            ids.append(self._ids[match[match.lastindex]])
        stretch += text[at:]
        end_stretch()
        return ids


@functools.lru_cache(maxsize=4)
def marks_of(tokenizer: Tokenizer) -> Marks:
    """Returns the marks of a tokenizer, cached."""
    return Marks(tokenizer)


def special(name: str) -> str:
    """Returns the marked form of a control token."""
    return f"{_MARK}{name}"


def plain(text: str) -> str:
    """Returns the marked form of ordinary text."""
    return text.replace(_MARK, _MARK * 2)
