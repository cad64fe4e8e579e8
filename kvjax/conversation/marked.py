"""Texts in which the control tokens that are meant are marked; any other name is ordinary text.

A chat template makes one text of a conversation, in which a control token that the template wrote
and one that a user typed would look alike. So names in messages are hidden before it is rendered:
the names in what comes out are the template's, which are marked, and what was hidden is put back.

Marks are code points that Unicode leaves to programs (noncharacters). Where a message holds such,
they are hidden as names are.
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
    """Marks and reads texts for one tokenizer."""

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
        # transformers lets some tokens take the blanks beside them along.
        pieces = (
            (r"\s*" if name in flags and flags[name].lstrip else "")
            + f"{_MARK}({re.escape(name)})"
            + (r"\s*" if name in flags and flags[name].rstrip else "")
            for name in sorted(names, key=len, reverse=True)
        )
        self._meant = re.compile("|".join((f"{_MARK}{_MARK}", *pieces)))

    def hide(self, value, kept: frozenset[str] = frozenset()):
        """A message, or a part of one, with the names in its texts hidden.

        A name's beginning that ends a text is hidden too: what follows may complete it.

        Args:
          kept: names that stay as they are.
        """
        if isinstance(value, str):
            return self._end_hidden(self._names_hidden(value, kept))
        if isinstance(value, Mapping):
            return {self._names_hidden(key): self.hide(v, kept) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(part, kept) for part in value]
        return value

    def _names_hidden(self, text, kept: frozenset[str] = frozenset()):
        def hidden(found: re.Match) -> str:
            return found[0] if found[0] in kept else self._stand_in(found[0])

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
        """What was rendered from hidden messages, marked."""

        def made(found: re.Match) -> str:
            if not found[1]:
                return special(found[0])
            number = int("".join(str(_DIGITS.index(digit)) for digit in found[1][1:-1]))
            return plain(self._hidden[number])

        return self._made.sub(made, text)

    def encode(self, text: str) -> list[int]:
        """Encodes a marked text, each stretch between control tokens by itself."""
        ids, stretch, at = [], "", 0

        def end_stretch() -> None:
            if stretch:
                ids.extend(self._tokenizer.encode(stretch))

        for found in self._meant.finditer(text):
            stretch += text[at : found.start()]
            at = found.end()
            if not found.lastindex:
                stretch += _MARK
                continue
            end_stretch()
            stretch = ""
            ids.append(self._ids[found[found.lastindex]])
        stretch += text[at:]
        end_stretch()
        return ids


@functools.lru_cache(maxsize=4)
def marks_of(tokenizer: Tokenizer) -> Marks:
    """Those of a tokenizer, made once."""
    return Marks(tokenizer)


def special(name: str) -> str:
    """Returns the mark for a control token in a marked text."""
    return f"{_MARK}{name}"


def plain(text: str) -> str:
    """Ordinary text, in a marked one: whatever it holds."""
    return text.replace(_MARK, _MARK * 2)
