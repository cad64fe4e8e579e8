"""How the model of a workdir is talked to."""

from kvjax.conversation import dialogue, render
from kvjax.conversation.dialogue import Dialogue
from kvjax.workdir.trained import SavedModel


def of(found: SavedModel, *, limit: int = render.LIMIT, day: str = "") -> Dialogue:
    """By the nine special tokens, or by the template that it was published with.

    Args:
      limit: tokens that a prompt of the first kind is cut to.
      day: that a template is told, as 2026-11-27; "": the present one.

    Raises:
      UserError: its tokenizer has no such tokens, and there is no template.
    """
    return dialogue.make(
        found.tokenizer,
        found.template,
        found.token_files,
        where=str(found.workdir),
        limit=limit,
        day=day,
    )
