"""Workdirs of tiny random models with conversation tokens."""

import pathlib

from etils import epath

from kvjax.convert import into_workdir
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.model.config import TransformerConfig
from tests.convert import workdirs

TOKENIZER = tokenizer_lib.byte_tokenizer().with_specials(tokenizer_lib.CONVERSATION_SPECIALS)


class Talking(workdirs.Made):
    """A tiny random model with a given tokenizer and context."""

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer, context: int):
        block, mechanism, _ = workdirs.MODELS["lrkv"]
        model = workdirs.config(block, mechanism)
        sizes = dict(block=model.block, mechanisms=model.mechanisms)
        super().__init__(TransformerConfig(**sizes, vocab_size=tokenizer.vocab_size))
        self.tokenizer_json, self.context = tokenizer.to_json(), context


def write(
    folder: pathlib.Path,
    *,
    tokenizer: tokenizer_lib.Tokenizer = TOKENIZER,
    template: str | None = None,
    context: int = 600,
) -> epath.Path:
    """Writes a workdir.

    Args:
      template: chat template, in Jinja.
      context: tokens that it was trained on.
    """
    model = Talking(tokenizer, context)
    model.chat_template = template
    into_workdir.write(model, epath.Path(folder), dict(source="tests"))
    return epath.Path(folder)
