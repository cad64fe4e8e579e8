"""The chat templates that models are published with: Jinja, rendered in a sandbox.

Templates see what transformers shows them (5.23), so that a conversation has the ids that its
`apply_chat_template` gives; but control tokens written out in a message stay ordinary text (see
`controls`). In an assistant's message those of an answer's format are the tokens, as </think>.
"""

from collections.abc import Iterable, Mapping, Sequence
import hashlib
import json

from kvjax.conversation import controls, jinja_process, marked
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import DataError

_FILE = "tokenizer_config.json"  # names the special tokens that templates write
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_ROLES = ("system", "developer", "user", "assistant", "tool")  # which templates tell apart
_DATED = "strftime_now"  # by which templates ask for the day
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
      day: that the template is told, as 2026-11-27; "": the present one.
      named: special tokens that other files of its model name.

    Attributes:
      tokenizer: with the template's control tokens; its `ends` have the one that ends a turn.
      missing: tokens that the model's files name, the template writes and the tokenizer lacks.
      digest: of its text and the tokens that it names, SHA-256.
      is_dated: whether it may write the day.

    Raises:
      UserError: a template that is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str,
        token_files: Mapping[str, Mapping],
        *,
        day: str = "",
        named: Iterable[str] = (),
    ):
        literals = jinja_process.literals(text)
        self._text, self._day = text, day
        self._tokens = _named_tokens(token_files.get(_FILE, {}))
        said = json.dumps([text, {k: v for k, v in self._tokens.items() if k in text}])
        self.digest, self.is_dated = hashlib.sha256(said.encode()).hexdigest(), _DATED in text
        named = {*self._tokens.values(), *named}
        found = controls.find(tokenizer, text, literals, named, self._tried)
        self.missing = sorted(found.missing)
        self.tokenizer, self._inner = tokenizer.controlled(found.names), found.inner
        if found.end is not None:
            end = self.tokenizer.special(found.end)
            self.tokenizer.ends = tuple(sorted({*tokenizer.ends, end}))
        self._marks = marked.marks_of(self.tokenizer)

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
        hidden = [self._hidden(message) for message in messages]
        if go_on:
            hidden[-1] = hidden[-1] | dict(content=f"{hidden[-1]['content']}{_HERE} ")
        text = self._rendered(hidden, add_generation_prompt)
        if go_on:
            before, here, after = text.rpartition(_HERE)
            if not here:
                raise DataError("the chat template leaves out the message that is to be continued")
            text = before if after.startswith(" ") else before.rstrip()  # as transformers does
        return self._marks.of_rendered(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a marked text."""
        return self._marks.encode(text)

    def _hidden(self, message: Mapping) -> dict:
        """Returns a message in which no text is the name of a control token."""
        role = message.get("role")
        hidden = self._marks.hide(message, self._inner if role == "assistant" else frozenset())
        return hidden | (dict(role=role) if role in _ROLES else {})

    def _rendered(
        self, messages: Sequence[Mapping], opens_answer: bool, *, trial: bool = False
    ) -> str:
        """Renders messages with the template.

        Raises:
          DataError: the template refuses them.
          UserError: it takes too much memory or time.
        """
        given = dict(messages=messages, tools=None, documents=None)
        given |= dict(add_generation_prompt=opens_answer)
        return jinja_process.render(self._text, self._tokens | given, self._day, trial=trial)

    def _tried(self, messages: Sequence[Mapping], opens_answer: bool) -> str:
        """Renders messages with the template; returns "" where it refuses them."""
        try:
            return self._rendered(messages, opens_answer, trial=True)
        except DataError:
            return ""


def _named_tokens(said: Mapping) -> dict[str, str]:
    """bos_token and so on, as far as a model's files name them."""
    found = {}
    for name in (f"{kind}_token" for kind in _NAMED):
        value = said.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[name] = value
    return found
