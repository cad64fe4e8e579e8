"""The chat templates that models are published with: Jinja, rendered in a sandbox.

Templates see what transformers shows them (5.23), so that a conversation has the ids that its
`apply_chat_template` gives; but special tokens written out in a message stay ordinary text.
"""

from collections.abc import Mapping
from collections.abc import Sequence

from kvjax.conversation import jinja_process
from kvjax.conversation import marked
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import DataError

_FILE = "tokenizer_config.json"  # names the special tokens that templates write
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_HERE = "\ufddc"  # where a message is to be continued


def encode(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping],
    template_text: str,
    token_files: Mapping[str, Mapping],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The ids of a conversation.

    Args:
      messages: {role, content}; what the template makes of other keys, it may have.
      template_text: a workdir's chat_template.jinja.
      token_files: of the model, see `kvjax.workdir.origin`.
      add_generation_prompt: whether what opens an answer follows.

    Raises:
      UserError: a template that is none.
      DataError: messages that the template refuses.
    """
    made = Template(tokenizer, template_text, token_files)
    return made.encode(made.render(messages, add_generation_prompt=add_generation_prompt))


class Template:
    """A model's template: messages to marked text (see `marked`), and that to ids.

    Args:
      text: a workdir's chat_template.jinja.
      token_files: of the model, see `kvjax.workdir.origin`.

    Raises:
      UserError: a template that is none.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, token_files: Mapping[str, Mapping]):
        jinja_process.check(text)
        self._text, self._marks = text, marked.of(tokenizer)
        self._tokens = _named_tokens(token_files.get(_FILE, {}))

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        go_on: bool = False,
    ) -> str:
        """A conversation as marked text.

        Args:
          go_on: whether the text ends within the last message, to be continued.

        Raises:
          DataError: messages that the template refuses.
          UserError: it takes too much memory or time.
        """
        hidden = [self._marks.hide(message) for message in messages]
        if go_on:
            hidden[-1] = hidden[-1] | dict(content=f"{hidden[-1]['content']}{_HERE} ")
        given = dict(messages=hidden, tools=None, documents=None)
        given |= dict(add_generation_prompt=add_generation_prompt)
        text = jinja_process.render(self._text, self._tokens | given)
        if go_on:
            before, here, after = text.rpartition(_HERE)
            if not here:
                raise DataError("the chat template leaves out the message that is to be continued")
            text = before if after.startswith(" ") else before.rstrip()  # as transformers does
        return self._marks.of_rendered(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a marked text."""
        return self._marks.encode(text)


def _named_tokens(said: Mapping) -> dict[str, str]:
    """bos_token and so on, as far as a model's files name them."""
    found = {}
    for name in (f"{kind}_token" for kind in _NAMED):
        value = said.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[name] = value
    return found
