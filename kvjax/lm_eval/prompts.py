"""The texts that lm-evaluation-harness asks with, as token ids.

It passes texts about, also those that a chat template made. These begin with a sign, so that they
are read with their marks (see `kvjax.conversation.marked`) and no other text is.
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

_RENDERED = "\ufdef"  # opens what a template made: a code point that is no character
_PLACE = "a conversation of the task"


class Prompts:
    """Texts to ids, and conversations to texts, for the model of a workdir."""

    def __init__(self, found: SavedModel):
        self._tokenizer, self._marks = found.tokenizer, marked.marks_of(found.tokenizer)
        self._bos = found.tokenizer.decode([found.tokenizer.bos_id])
        self.template, self._files = _template(found), found.token_files

    @property
    def is_native(self) -> bool:
        """Whether conversations are those of `kvjax.conversation.render`."""
        return not specials.missing(self._tokenizer)

    @property
    def name(self) -> str:
        """A name for the tokenizer with the template: a digest of what their prompts depend on."""
        said = f"{self._tokenizer.to_json()}\0{self.template}\0{json.dumps(self._files)}"
        return f"kvjax-{hashlib.sha256(said.encode()).hexdigest()[:16]}"

    def encode(self, text: str, *, opened: bool = True) -> list[int]:
        """The ids of a text.

        Args:
          opened: whether BOS comes first, once; what a template made begins as it does.
        """
        if self.is_rendered(text):
            return self._marks.encode(text[1:])
        if not opened:
            return self._tokenizer.encode(text)
        return [self._tokenizer.bos_id, *self._tokenizer.encode(text.removeprefix(self._bos))]

    @staticmethod
    def is_rendered(text: str) -> bool:
        """Whether a template made a text."""
        return text.startswith(_RENDERED)

    def joined(self, context: str, continuation: str) -> str:
        """Both as one text, for `encode`."""
        rendered = self.is_rendered(context)
        return context + (marked.plain(continuation) if rendered else continuation)

    def render(self, messages: Sequence[Mapping], *, opens_answer: bool = True) -> str:
        """A conversation as a text for `encode`.

        Args:
          opens_answer: whether an answer is to follow; else the last message is to be continued.

        Raises:
          UserError: the model knows no conversations, or not this one.
        """
        if self.template is None:
            raise UserError(no_template())
        if self.is_native:
            return _RENDERED + _native(messages, opens_answer)
        options = dict(add_generation_prompt=opens_answer, go_on=not opens_answer)
        return _RENDERED + self._published.render(messages, **options)

    @functools.cached_property
    def _published(self) -> Template:
        return Template(self._tokenizer, self.template, self._files)


def no_template() -> str:
    """What is wrong with a model that knows no conversations."""
    return (
        "--apply_chat_template: the model knows no conversations: its tokenizer lacks the special "
        f"tokens of conversations, and its workdir has no {origin.CHAT_TEMPLATE}"
    )


_NATIVE = (
    "{bos}{% for message in messages %}{start of role}{{ message.content }}{end of role}"
    "{% endfor %}{start of assistant}"
)


def _template(found: SavedModel) -> str | None:
    """The text of the template; a description where conversations are rendered without one."""
    if not specials.missing(found.tokenizer):
        return _NATIVE
    return found.template


def _native(messages: Sequence[Mapping], opens_answer: bool) -> str:
    """The text of the ids that `kvjax.conversation.render` gives for a conversation."""
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
