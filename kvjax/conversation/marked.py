"""Texts in which the special tokens that are meant are marked; any other name is ordinary text.

A chat template makes one text of a conversation, in which a special token that the template wrote
and one that a user typed would look alike. So names in messages are hidden before it is rendered:
the names in what comes out are the template's, which are marked, and what was hidden is put back.

Marks are code points that Unicode leaves to programs (noncharacters). Where a message holds such,
they are hidden as names are.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import functools
import json
import re

from kvjax.data.tokenizer import Tokenizer

_MARK, _END = "\ufdd0", "\ufdd1"
_DIGITS = "".join(map(chr, range(0xFDD2, 0xFDDC)))
_HIDDEN = f"{_MARK}[{_DIGITS}]+{_END}"


class Marks:
    """Marks and reads texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        added = json.loads(tokenizer.to_json())["added_tokens"]
        specials = {token["content"]: token for token in added if token["special"]}
        specials = {name: specials[name] for name in sorted(specials, key=len, reverse=True)}
        self._tokenizer = tokenizer
        self._hidden = (*specials, _MARK, _END, *_DIGITS)
        self._numbers = {text: number for number, text in enumerate(self._hidden)}
        self._to_hide = re.compile(_any_of(map(re.escape, self._hidden)))
        self._made = re.compile(f"({_HIDDEN})|{_any_of(map(re.escape, specials))}")
        # transformers lets some tokens take the blanks beside them along.
        pieces = (
            r"\s*" * token["lstrip"] + f"{_MARK}{re.escape(name)}" + r"\s*" * token["rstrip"]
            for name, token in specials.items()
        )
        self._meant = re.compile(f"({_MARK}{_MARK})|{_any_of(pieces)}")

    def hide(self, value):
        """A message, or a part of one, with the names in its texts hidden."""
        if isinstance(value, str):
            return self._to_hide.sub(lambda found: _stand_in(self._numbers[found[0]]), value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(part) for part in value]
        return value

    def of_rendered(self, text: str) -> str:
        """What was rendered from hidden messages, marked."""

        def made(found: re.Match) -> str:
            if not found[1]:
                return special(found[0])
            number = int("".join(str(_DIGITS.index(digit)) for digit in found[1][1:-1]))
            return plain(self._hidden[number])

        return self._made.sub(made, text)

    def encode(self, text: str) -> list[int]:
        """The ids of a marked text, each stretch between specials encoded by itself."""
        ids, stretch, at = [], "", 0

        def end_stretch() -> None:
            if stretch:
                ids.extend(self._tokenizer.encode(stretch))

        for found in self._meant.finditer(text):
            stretch += text[at : found.start()]
            at = found.end()
            if found[1]:
                stretch += _MARK
                continue
            end_stretch()
            stretch = ""
            ids.append(self._tokenizer.special(found[0].strip()[1:]))
        stretch += text[at:]
        end_stretch()
        return ids


@functools.lru_cache(maxsize=4)
def of(tokenizer: Tokenizer) -> Marks:
    """Those of a tokenizer, made once."""
    return Marks(tokenizer)


def special(name: str) -> str:
    """A special token that is meant, in a marked text."""
    return f"{_MARK}{name}"


def plain(text: str) -> str:
    """Ordinary text, in a marked one: whatever it holds."""
    return text.replace(_MARK, _MARK * 2)


def _stand_in(number: int) -> str:
    return f"{_MARK}{''.join(_DIGITS[int(digit)] for digit in str(number))}{_END}"


def _any_of(patterns: Iterable[str]) -> str:
    """A pattern for the first of these that is there; for nothing if there are none."""
    return "|".join(patterns) or "(?!)"
