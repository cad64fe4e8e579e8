"""Published chat templates: Jinja, rendered in a separate process.

A conversation gets the ids of `apply_chat_template` in transformers (5.23), except that the name of
a control token in a message is ordinary text (see `controls`). In an assistant's message, tokens of
the answer format such as </think> are still control tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
import hashlib
import json

from kvjax.conversation import controls, jinja_process, marked
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import DataError

_TOKENIZER_CONFIG = "tokenizer_config.json"  # names the special tokens that templates write
_TOKEN_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_ROLES = ("system", "developer", "user", "assistant", "tool")  # compared by templates
_DATE = "strftime_now"  # the function by which templates get the date
_MESSAGE_END = "\ufddc"  # marks the end of a message that is to be continued


class Template:
    """A model's chat template.

    Renders messages as marked text, in which control tokens have a mark (see `marked`), and encodes
    marked text.

    Args:
      text: a workdir's chat_template.jinja.
      token_files: the model's files about tokens, see `kvjax.workdir.origin`.
      day: date for the template, as 2026-11-27; "": today.
      extra_tokens: special tokens that other files of the model name.

    Attributes:
      tokenizer: the tokenizer, which knows the template's control tokens; its `ends` include the
        token that ends a turn.
      missing: named tokens that the template writes and the tokenizer lacks.
      digest: SHA-256 of the template and the tokens that it names.
      is_dated: True if it may write the date.

    Raises:
      UserError: an invalid template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str,
        token_files: Mapping[str, Mapping],
        *,
        day: str = "",
        extra_tokens: Iterable[str] = (),
    ):
        literals = jinja_process.literals(text)
        self._text, self._day = text, day
        self._tokens = _named_tokens(token_files.get(_TOKENIZER_CONFIG, {}))
        used = json.dumps([text, {k: v for k, v in self._tokens.items() if k in text}])
        self.digest, self.is_dated = hashlib.sha256(used.encode()).hexdigest(), _DATE in text
        named = {*self._tokens.values(), *extra_tokens}
        control = controls.find(tokenizer, text, literals, named, self._render_trial)
        self.missing = sorted(control.missing)
        self.tokenizer = tokenizer.controlled(control.names)
        self._answer_tokens = control.in_answers
        if control.end is not None:
            end = self.tokenizer.special(control.end)
            self.tokenizer.ends = tuple(sorted({*tokenizer.ends, end}))
        self._marks = marked.marks_of(self.tokenizer)

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Renders a conversation as marked text.

        Args:
          messages: {role, content}, and other keys that the template reads.
          add_generation_prompt: open an answer at the end.
          continue_final_message: end within the last message, so that an answer continues it.

        Raises:
          DataError: messages that the template refuses.
          UserError: too much memory or time.
        """
        hidden = [self._hide_controls(message) for message in messages]
        if continue_final_message:
            hidden[-1] = hidden[-1] | dict(content=f"{hidden[-1]['content']}{_MESSAGE_END} ")
        text = self._render(hidden, add_generation_prompt)
        if continue_final_message:
            before, marker, after = text.rpartition(_MESSAGE_END)
            if not marker:
                raise DataError("the chat template drops the message that is to be continued")
            # As in transformers: a template that strips messages has dropped the space after the
            # marker, and then strips this message too.
            text = before if after.startswith(" ") else before.rstrip()
        return self._marks.of_rendered(text)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a marked text."""
        return self._marks.encode(text)

    def _hide_controls(self, message: Mapping) -> dict:
        """Returns a message with placeholders for the names of control tokens in it."""
        role = message.get("role")
        kept = self._answer_tokens if role == "assistant" else frozenset()
        hidden = self._marks.hide(message, kept)
        return hidden | (dict(role=role) if role in _ROLES else {})

    def _render(
        self, messages: Sequence[Mapping], opens_answer: bool, *, trial: bool = False
    ) -> str:
        """Renders messages with the template.

        Raises:
          DataError: the template refuses them.
          UserError: too much memory or time.
        """
        variables = dict(messages=messages, tools=None, documents=None)
        variables |= dict(add_generation_prompt=opens_answer)
        return jinja_process.render(self._text, self._tokens | variables, self._day, trial=trial)

    def _render_trial(self, messages: Sequence[Mapping], opens_answer: bool) -> str:
        """Renders messages with the template; returns "" if it refuses them."""
        try:
            return self._render(messages, opens_answer, trial=True)
        except DataError:
            return ""


def _named_tokens(config: Mapping) -> dict[str, str]:
    """Returns the special tokens of a tokenizer_config.json: bos_token and so on."""
    tokens = {}
    for name in (f"{kind}_token" for kind in _TOKEN_KINDS):
        value = config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens
