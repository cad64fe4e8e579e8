"""How the model of a workdir is talked to."""

from kvjax.conversation import dialogue
from kvjax.conversation import render
from kvjax.conversation.dialogue import Dialogue
from kvjax.workdir import origin
from kvjax.workdir.trained import Found


def of(found: Found, *, limit: int = render.LIMIT) -> Dialogue:
    """By the nine special tokens, or by the template that it was published with.

    Args:
      limit: tokens that a prompt of the first kind is cut to.

    Raises:
      UserError: its tokenizer has no such tokens, and there is no template.
    """
    return dialogue.of(
        found.tokenizer,
        template_of(found),
        found.token_files,
        where=str(found.workdir),
        limit=limit,
    )


def template_of(found: Found) -> str | None:
    """The template that its model was published with, in Jinja; None: without."""
    path = found.workdir / origin.CHAT_TEMPLATE
    return origin.text_of(path) if path.exists() else None
