"""Converts messages to prompts: with nine special tokens, or with a published chat template."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvjax.conversation import render, specials as specials_lib
from kvjax.conversation.specials import Specials
from kvjax.conversation.template import Template
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import UserError


class Dialogue(Protocol):
    """Converts messages to a prompt that an answer follows.

    Attributes:
      name: "nanochat", "template", or "" for none.
      tokenizer: the model's tokenizer.
      ends: token ids that end an answer.
      digest: digest of the chat template; "" without a template.
      day: the date that the template writes, if it writes one and one was given; else "".
      specials: ids of the special tokens, for a model that may call the calculator; else None.
    """

    name: str
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    digest: str
    day: str
    specials: Specials | None

    def prompt(self, messages: Sequence[Mapping], place: str = "conversation") -> render.Rendered:
        """Renders a prompt for the assistant; the last message must be the user's.

        Raises:
          DataError: roles that do not alternate, content that is not text.
        """

    def begun(self, messages: Sequence[Mapping], answer: str) -> list[int]:
        """Returns the ids of a prompt with the start of its answer, which generation continues."""


class NativeDialogue:
    """nanochat's format, see `kvjax.conversation.render`.

    Args:
      limit: maximum tokens of a prompt; longer ones lose their end.
    """

    name = "nanochat"
    digest, day = "", ""

    def __init__(self, tokenizer: Tokenizer, where: str, limit: int = render.LIMIT):
        self._renderer, self._limit = render.Renderer(tokenizer, where), limit
        self.tokenizer, self.specials = tokenizer, self._renderer.specials
        # The other special tokens do not end an answer: text follows a calculator call.
        self.ends = (self.specials.assistant_end, self.specials.bos)

    def prompt(self, messages: Sequence[Mapping], place: str = "conversation") -> render.Rendered:
        return self._renderer.prompt(list(messages), limit=self._limit, place=place)

    def begun(self, messages: Sequence[Mapping], answer: str) -> list[int]:
        return [*self.prompt(messages).ids, *self.tokenizer.encode(answer)]  # as in training


class PlainDialogue:
    """Refuses conversations, for base models; texts end like the tokenizer's documents."""

    name = ""
    digest, day = "", ""
    specials = None

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ends = tuple(dict.fromkeys((*tokenizer.ends, tokenizer.bos_id)))

    def prompt(self, messages: Sequence[Mapping], place: str = "conversation") -> render.Rendered:
        raise UserError(f"{place}: the model knows no conversations")

    def begun(self, messages: Sequence[Mapping], answer: str) -> list[int]:
        return self.prompt(messages).ids


class TemplatedDialogue:
    """A published model's Jinja chat template, as on Hugging Face."""

    name = "template"
    specials = None

    def __init__(self, tokenizer: Tokenizer, template: str, token_files: Mapping, day: str = ""):
        self._template = Template(tokenizer, template, token_files, day=day)
        self.digest = self._template.digest
        self.day = day if self._template.is_dated else ""
        self.tokenizer = self._template.tokenizer
        self.ends = tuple(dict.fromkeys((*self.tokenizer.ends, tokenizer.bos_id)))

    def prompt(self, messages: Sequence[Mapping], place: str = "conversation") -> render.Rendered:
        for i, message in enumerate(messages, 1):
            if not isinstance(message["content"], str):
                raise UserError(f"{place}, message {i}: content must be text for this model")
        ids = self._template.encode(self._template.render(messages))
        return render.Rendered(ids, [0] * len(ids))

    def begun(self, messages: Sequence[Mapping], answer: str) -> list[int]:
        # By the template: whether a blank precedes an answer depends on it.
        begun = [*messages, dict(role="assistant", content=answer)]
        options = dict(add_generation_prompt=False, continue_final_message=True)
        return self._template.encode(self._template.render(begun, **options))


def make(
    tokenizer: Tokenizer,
    template: str | None,
    token_files: Mapping,
    *,
    where: str,
    limit: int = render.LIMIT,
    day: str = "",
) -> Dialogue:
    """Returns a `NativeDialogue` if the tokenizer has the nine special tokens, else the template's.

    Args:
      where: the workdir, for messages.
      limit: see `NativeDialogue`.
      day: the date that a template writes, as 2026-11-27; "": today.

    Raises:
      UserError: neither the tokens nor a template.
    """
    if specials_lib.missing(tokenizer) and template is not None:
        return TemplatedDialogue(tokenizer, template, token_files, day)
    return NativeDialogue(tokenizer, where, limit)
