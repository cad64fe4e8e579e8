"""Converts the texts of lm-evaluation-harness to token ids.

The library passes rendered conversations as plain strings. Here they start with a sentinel: only
strings with it are encoded as marked texts (`kvjax.conversation.marked`).
"""

from collections.abc import Mapping, Sequence
import functools
import hashlib
import json

from kvjax.conversation import marked, render, specials
from kvjax.conversation.template import Template
from kvjax.foundation.errors import UserError
from kvjax.workdir import origin
from kvjax.workdir.trained import SavedModel

_RENDERED = "\ufdef"  # sentinel of rendered conversations: a Unicode noncharacter
_PLACE = "a conversation of the task"


class Prompts:
    """Encodes texts and renders conversations for the model of a workdir."""

    def __init__(self, saved: SavedModel):
        self._tokenizer, self._marks = saved.tokenizer, marked.marks_of(saved.tokenizer)
        self._bos = saved.tokenizer.decode([saved.tokenizer.bos_id])
        self.template, self._files = _template(saved), saved.token_files

    @property
    def is_native(self) -> bool:
        """True if conversations are rendered by `kvjax.conversation.render`."""
        return not specials.missing(self._tokenizer)

    @property
    def name(self) -> str:
        """Name of the tokenizer: a digest of everything that encoded prompts depend on."""
        content = f"{self._tokenizer.to_json()}\0{self.template}\0{json.dumps(self._files)}"
        return f"kvjax-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def encode(self, text: str, *, opened: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
          opened: put one BOS in front; ignored for a rendered conversation, which has its own.
        """
        if self.is_rendered(text):
            return self._marks.encode(text[1:], "start" if self.is_native else "control")
        if not opened:
            return self._tokenizer.encode(text)
        return [self._tokenizer.bos_id, *self._tokenizer.encode(text.removeprefix(self._bos))]

    @staticmethod
    def is_rendered(text: str) -> bool:
        """Returns True if a text is a rendered conversation."""
        return text.startswith(_RENDERED)

    def joined(self, context: str, continuation: str) -> str:
        """Concatenates a context and a continuation to a text for `encode`."""
        rendered = self.is_rendered(context)
        return context + (marked.plain(continuation) if rendered else continuation)

    def render(self, messages: Sequence[Mapping], *, opens_answer: bool = True) -> str:
        """Renders a conversation as a text for `encode`.

        Args:
          opens_answer: open an answer at the end; False: leave the last message open.

        Raises:
          UserError: the model has no chat format, or refuses this conversation.
        """
        if self.template is None:
            raise UserError(no_template())
        if self.is_native:
            return _RENDERED + _native(messages, opens_answer)
        options = dict(add_generation_prompt=opens_answer, continue_final_message=not opens_answer)
        return _RENDERED + self._published.render(messages, **options)

    @functools.cached_property
    def _published(self) -> Template:
        return Template(self._tokenizer, self.template, self._files)


def no_template() -> str:
    """Returns the message for a model without a chat format."""
    return (
        "--apply_chat_template: the model has no chat format: its tokenizer lacks the special "
        f"tokens of conversations, and its workdir has no {origin.CHAT_TEMPLATE}"
    )


# Describes the native format to lm-evaluation-harness; never rendered by Jinja.
_NATIVE = (
    "{bos}{% for message in messages %}{start of role}{{ message.content }}{end of role}"
    "{% endfor %}{start of assistant}"
)


def _template(saved: SavedModel) -> str | None:
    """Returns the model's chat template, or a description of the native format."""
    if not specials.missing(saved.tokenizer):
        return _NATIVE
    return saved.template


def _native(messages: Sequence[Mapping], opens_answer: bool) -> str:
    """Renders a conversation as `kvjax.conversation.render` does, as a marked text."""
    bos, user_start, user_end, assistant_start, assistant_end = map(
        marked.special, specials.NAMES[:5]
    )
    text = bos
    for message in render.checked_messages(dict(messages=messages), _PLACE):
        content = marked.plain(message["content"])
        if message["role"] == "user":
            text += f"{user_start}{content}{user_end}"
        else:
            text += f"{assistant_start}{content}{assistant_end}"
    return text + assistant_start if opens_answer else text.removesuffix(assistant_end)
