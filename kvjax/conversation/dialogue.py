"""How a model is talked to: by the nine specials, or by the template it was published with."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvjax.conversation import render, specials as specials_lib
from kvjax.conversation.specials import Specials
from kvjax.conversation.template import Template
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import UserError


class Dialogue(Protocol):
    """Messages to the tokens that an answer follows.

    Attributes:
      name: "nanochat", "template", or "" for none.
      tokenizer: of the model.
      ends: ids that end an answer.
      digest: of its chat template; "" for none.
      day: that its template is told, if it asks for one and one was given; else "".
      specials: of a model that may call the calculator; None: it never does.
    """

    name: str
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    digest: str
    day: str
    specials: Specials | None

    def prompt(self, messages: Sequence[Mapping], place: str = "conversation") -> render.Rendered:
        """What the assistant goes on from; the last message is the user's.

        Raises:
          DataError: roles that do not alternate, a content that is no text; with the place.
        """


class NativeDialogue:
    """nanochat's, see `kvjax.conversation.render`.

    Args:
      limit: tokens that a prompt is cut to before its answer is asked for.
    """

    name = "nanochat"
    digest, day = "", ""

    def __init__(self, tokenizer: Tokenizer, where: str, limit: int = render.LIMIT):
        self._renderer, self._limit = render.Renderer(tokenizer, where), limit
        self.tokenizer, self.specials = tokenizer, self._renderer.specials
        # Not all specials: a call's end goes on.
        self.ends = (self.specials.assistant_end, self.specials.bos)

    def prompt(self, messages: Sequence[Mapping], place: str = "conversation") -> render.Rendered:
        return self._renderer.prompt(list(messages), limit=self._limit, place=place)


class PlainDialogue:
    """No dialogue at all: texts go on, and end as the tokenizer's documents do."""

    name = ""
    digest, day = "", ""
    specials = None

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ends = tuple(dict.fromkeys((*tokenizer.ends, tokenizer.bos_id)))

    def prompt(self, messages: Sequence[Mapping], place: str = "conversation") -> render.Rendered:
        raise UserError(f"{place}: the model knows no conversations")


class TemplatedDialogue:
    """That of a published model: a template in Jinja, as Hugging Face has them."""

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


def make(
    tokenizer: Tokenizer,
    template: str | None,
    token_files: Mapping,
    *,
    where: str,
    limit: int = render.LIMIT,
    day: str = "",
) -> Dialogue:
    """The nine specials if the tokenizer has them, else the template.

    Args:
      where: for messages: the workdir.
      day: that a template is told, as 2026-11-27; "": the present one.

    Raises:
      UserError: neither is there.
    """
    if specials_lib.missing(tokenizer) and template is not None:
        return TemplatedDialogue(tokenizer, template, token_files, day)
    return NativeDialogue(tokenizer, where, limit)
