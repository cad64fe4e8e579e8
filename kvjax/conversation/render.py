"""Renders conversations as token ids with a loss mask.

nanochat's format (commit 0f00788):

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> content <|assistant_end|> ...

The mask is 1 on the assistant's text, its calculator calls and <|assistant_end|>; 0 on everything
else, including the calculator's output. The parts of a content are encoded separately.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.conversation import specials as specials_lib
from kvjax.conversation.mixture import LIMIT
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import DataError

PARTS = ("text", "python", "python_output")

Conversation = Mapping[str, Any]  # {"messages": [{"role", "content"}]}


class Rendered(NamedTuple):
    """A conversation's tokens."""

    ids: list[int]
    mask: list[int]  # 1 for tokens that count in the loss
    is_cut: bool = False  # True if it was longer than the limit


class Renderer:
    """Renders conversations with one tokenizer.

    Args:
      where: the tokenizer's owner, for messages.

    Raises:
      UserError: a tokenizer without the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, where: str = "the workdir"):
        self.tokenizer = tokenizer
        self.specials = specials_lib.ids(tokenizer, where)

    def __call__(
        self, conversation: Conversation, *, limit: int = LIMIT, place: str = "conversation"
    ) -> Rendered:
        """Renders a conversation; keeps its first `limit` tokens.

        Args:
          place: file and row, for messages.

        Raises:
          DataError: see `checked_messages`.
        """
        pieces = list(self._pieces(conversation, place))
        texts = (piece for piece, _ in pieces if isinstance(piece, str))
        return _joined(pieces, map(self.tokenizer.encode, texts), limit)

    def batch(
        self, conversations: Sequence[tuple[Conversation, str]], *, limit: int = LIMIT
    ) -> list[Rendered | DataError]:
        """Renders pairs of a conversation and its `place` on all cores; see `__call__`.

        Returns:
          Each conversation's tokens, or its error.
        """
        all_pieces, texts = [], []
        for conversation, place in conversations:
            try:
                pieces = list(self._pieces(conversation, place))
            except DataError as error:
                all_pieces.append(error)
                continue
            all_pieces.append(pieces)
            texts += [piece for piece, _ in pieces if isinstance(piece, str)]
        encoded = (ids.tolist() for ids in self.tokenizer.encode_batch(texts))
        return [p if isinstance(p, DataError) else _joined(p, encoded, limit) for p in all_pieces]

    def _pieces(self, conversation: Conversation, place: str) -> Iterator[tuple[int | str, int]]:
        """Yields special token ids and texts in order, each with its loss mask."""
        s = self.specials
        delimiters = dict(
            python=(s.python_start, s.python_end, 1),
            python_output=(s.output_start, s.output_end, 0),
        )
        yield s.bos, 0
        for message in checked_messages(conversation, place):
            content = message["content"]
            if message["role"] == "user":
                yield from ((piece, 0) for piece in (s.user_start, content, s.user_end))
                continue
            yield s.assistant_start, 0
            parts = [dict(type="text", text=content)] if isinstance(content, str) else content
            for part in parts:
                if part["type"] == "text":
                    yield part["text"], 1
                    continue
                start, end, trained = delimiters[part["type"]]
                yield from ((piece, trained) for piece in (start, part["text"], end))
            yield s.assistant_end, 1

    def prompt(
        self, messages: list[dict], *, limit: int = LIMIT, place: str = "conversation"
    ) -> Rendered:
        """Renders messages, which end with the user's, and opens the assistant's answer."""
        ids, mask, is_cut = self(dict(messages=messages), limit=limit, place=place)
        return Rendered([*ids, self.specials.assistant_start], [*mask, 0], is_cut)


def _joined(
    pieces: Sequence[tuple[int | str, int]], encoded: Iterator[list[int]], limit: int
) -> Rendered:
    ids, mask = [], []
    for piece, trained in pieces:
        new = next(encoded) if isinstance(piece, str) else [piece]
        ids += new
        mask += [trained] * len(new)
    return Rendered(ids[:limit], mask[:limit], len(ids) > limit)


def checked_messages(conversation: Conversation, place: str) -> list[dict]:
    """Returns a conversation's messages, a system message merged into the first user message.

    Raises:
      DataError: not an object with `messages`, roles that do not alternate, content of another type
        or an unknown part.
    """
    messages = conversation.get("messages") if isinstance(conversation, Mapping) else None
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(f"{place}: needs 'messages', a list of at least one {{role, content}}")
    messages = [_message(message, i, place) for i, message in enumerate(messages)]
    first = 1
    if messages[0]["role"] == "system":
        if len(messages) < 2 or messages[1]["role"] != "user":
            raise DataError(f"{place}: a system message must be followed by the user's")
        system, user, *rest = messages
        for i, message in enumerate((system, user)):
            _check_text(message["content"], f"{place}, message {i + 1}")
        joined = f"{system['content']}\n\n{user['content']}"
        messages, first = [dict(role="user", content=joined), *rest], 2
    for i, message in enumerate(messages):
        role = ("user", "assistant")[i % 2]
        if message["role"] != role:
            raise DataError(
                f"{place}: roles must alternate user, assistant, user, ... (after an optional "
                f"system message); message {i + first} has role {message['role']!r}, not {role!r}"
            )
        where = f"{place}, message {i + first}"
        if role == "user" or isinstance(message["content"], str):
            _check_text(message["content"], where)
        else:
            _check_parts(message["content"], where)
    return messages


def _message(message, i: int, place: str) -> dict:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise DataError(f"{place}, message {i + 1}: must be an object with role and content")
    return dict(role=message["role"], content=message["content"])


def _check_parts(content, where: str) -> None:
    if not isinstance(content, (list, tuple)):
        raise DataError(f"{where}: content must be text or a list of parts, not {content!r:.80}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in PARTS:
            raise DataError(f"{where}: a part must have a type of {', '.join(PARTS)}: {part!r:.80}")
        _check_text(part.get("text"), where)


def _check_text(text, where: str) -> None:
    """Raises a DataError unless a content is text that UTF-8 can encode."""
    if not isinstance(text, str):
        raise DataError(f"{where}: content must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: has an unpaired surrogate, which UTF-8 cannot encode") from error
