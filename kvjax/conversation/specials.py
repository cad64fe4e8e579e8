"""The nine special tokens of rendered conversations (nanochat, commit 0f00788).

Any ids will do. A name that occurs in a user's text stays ordinary text.
"""

from typing import NamedTuple

from kvjax.data import tokenizer as tokenizer_lib
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import UserError

NAMES = tokenizer_lib.CONVERSATION_SPECIALS


class Specials(NamedTuple):
    """Ids of the special tokens in a tokenizer."""

    bos: int
    user_start: int
    user_end: int
    assistant_start: int
    assistant_end: int
    python_start: int
    python_end: int
    output_start: int
    output_end: int


def missing(tokenizer: Tokenizer) -> list[str]:
    """Returns the special tokens that a tokenizer lacks."""
    return [name for name in NAMES if tokenizer.special(name) is None]


def ids(tokenizer: Tokenizer, where: str) -> Specials:
    """Returns the ids of all nine special tokens.

    Args:
      where: the tokenizer's owner, for messages.

    Raises:
      UserError: the tokenizer lacks some of them.
    """
    if lacking := missing(tokenizer):
        raise UserError(
            f"{where}: its tokenizer lacks {', '.join(lacking)}: the model was not trained on "
            "conversations. Mid-train it first, which adds them: python -m kvjax.main "
            "--config=configs/mid.py:lrkv_128m --config.train.parent=WORKDIR"
        )
    return Specials(*(tokenizer.special(name) for name in NAMES))
