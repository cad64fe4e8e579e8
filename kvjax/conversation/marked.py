"""Marks control tokens in rendered text, so that their names in messages stay ordinary text.

A chat template renders a conversation to one text, in which a control token that the template wrote
and a name that a user typed look alike. Names in messages are therefore replaced by placeholders
before rendering. All names in the rendered text are then the template's: they get a mark, and
placeholders become names again.

Marks and placeholders are Unicode noncharacters; those in a message get placeholders too.
"""

from collections.abc import Mapping
import functools
import re

from kvjax.conversation.controls import any_of
from kvjax.data.tokenizer import Tokenizer

_MARK, _END = "\ufdd0", "\ufdd1"
_DIGITS = "".join(map(chr, range(0xFDD2, 0xFDDC)))
_PLACEHOLDER = f"{_MARK}[{_DIGITS}]+{_END}"


class Marks:
    """Escapes messages, marks renderings and encodes marked texts, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        flags, names = tokenizer.added_tokens(), tokenizer.controls
        prefixes = {name[:i] for name in names for i in range(1, len(name))}
        self._tokenizer, self._prefixes = tokenizer, prefixes
        self._longest = max(map(len, prefixes), default=0)
        self._replaced = (*names, _MARK, _END, *_DIGITS, *{text[0] for text in prefixes})
        self._numbers = {text: number for number, text in enumerate(self._replaced)}
        self._to_hide = re.compile(any_of((*names, _MARK, _END, *_DIGITS)))
        self._placeholder_or_name = re.compile(f"({_PLACEHOLDER})|{any_of(names)}")
        self._ids = {name: tokenizer.special(name) for name in names}
        # Added tokens with lstrip or rstrip absorb adjacent blanks, as in transformers.
        pieces = (
            (r"\s*" if name in flags and flags[name].lstrip else "")
            + f"{_MARK}({re.escape(name)})"
            + (r"\s*" if name in flags and flags[name].rstrip else "")
            for name in sorted(names, key=len, reverse=True)
        )
        self._marked = re.compile("|".join((f"{_MARK}{_MARK}", *pieces)))

    def hide(self, value, kept: frozenset[str] = frozenset()):
        """Replaces the control tokens' names in all texts of a message by placeholders.

        A prefix of a name at the end of a text is replaced too: the template may complete it.

        Args:
          kept: names that stay.
        """
        if isinstance(value, str):
            return self._hide_prefix(self._hide_names(value, kept))
        if isinstance(value, Mapping):
            return {self._hide_names(key): self.hide(v, kept) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(part, kept) for part in value]
        return value

    def _hide_names(self, text, kept: frozenset[str] = frozenset()):
        def hidden(match: re.Match) -> str:
            return match[0] if match[0] in kept else self._placeholder(match[0])

        return self._to_hide.sub(hidden, text) if isinstance(text, str) else text

    def _hide_prefix(self, text: str) -> str:
        start = max(0, len(text) - self._longest)
        return text[:start] + "".join(
            self._placeholder(text[i]) if text[i:] in self._prefixes else text[i]
            for i in range(start, len(text))
        )

    def _placeholder(self, text: str) -> str:
        digits = str(self._numbers[text])
        return f"{_MARK}{''.join(_DIGITS[int(digit)] for digit in digits)}{_END}"

    def of_rendered(self, text: str) -> str:
        """Marks the names in a text rendered from hidden messages; restores placeholders."""

        def restored(match: re.Match) -> str:
            if not match[1]:
                return special(match[0])
            number = int("".join(str(_DIGITS.index(digit)) for digit in match[1][1:-1]))
            return plain(self._replaced[number])

        return self._placeholder_or_name.sub(restored, text)

    def encode(self, text: str, after_control: str = "control") -> list[int]:
        """Returns the ids of a marked text; text between control tokens is encoded separately.

        Args:
          after_control: place of the text after a control token, see `Tokenizer.encode`.
        """
        ids, pending, position = [], "", 0

        def encode_pending() -> None:
            if pending:
                ids.extend(self._tokenizer.encode(pending, after_control if ids else "start"))

        for match in self._marked.finditer(text):
            pending += text[position : match.start()]
            position = match.end()
            if not match.lastindex:
                pending += _MARK
                continue
            encode_pending()
            pending = ""
            ids.append(self._ids[match[match.lastindex]])
        pending += text[position:]
        encode_pending()
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
