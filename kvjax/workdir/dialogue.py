"""Makes the dialogue (chat format) of a workdir's model."""

from kvjax.conversation import dialogue, render
from kvjax.conversation.dialogue import Dialogue
from kvjax.workdir.trained import SavedModel


def of(saved: SavedModel, *, limit: int = render.LIMIT, day: str = "") -> Dialogue:
    """Returns a dialogue that uses the nine special tokens, or else the model's published template.

    Args:
      limit: tokens that prompts in special tokens are cut to.
      day: date for templates, such as 2026-11-27; "": today.

    Raises:
      UserError: the tokenizer lacks the special tokens, and there is no template.
    """
    return dialogue.make(
        saved.tokenizer,
        saved.template,
        saved.token_files,
        where=str(saved.workdir),
        limit=limit,
        day=day,
    )
