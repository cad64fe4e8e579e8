"""The messages of a conversation, and the turns that fit into the model's context."""

from collections.abc import Sequence
import json

from etils import epath

from kvjax.conversation.dialogue import Dialogue
from kvjax.conversation.specials import Specials
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket


class History:
    """The messages of a conversation, in order.

    Args:
      dialogue: the model's chat format.
      max_tokens: limit of a prompt.
      system: the system message; "": none.
    """

    def __init__(self, dialogue: Dialogue, max_tokens: int, system: str = ""):
        self._dialogue, self._max_tokens = dialogue, max_tokens
        self._system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict] = []

    @property
    def messages(self) -> list[dict]:
        return [*self._system, *self.turns]

    def add_question(self, text: str) -> tuple[list[int], int]:
        """Adds a message of the user.

        Returns:
          The ids of the prompt, and the number of turns that it leaves out, oldest first. A turn is
          a message of the user and its answer.

        Raises:
          UserError: the message alone exceeds the limit; it is not added.
        """
        question = {"role": "user", "content": text}
        kept = [*self.turns, question]
        left_out = 0
        while True:
            ids = self._dialogue.prompt([*self._system, *kept], "your message").ids
            if len(ids) <= self._max_tokens:
                self.turns.append(question)
                return ids, left_out
            if len(kept) == 1:
                raise UserError(
                    f"the message has {len(ids):,} tokens with the chat format around it, and "
                    f"there is room for {self._max_tokens:,}: say it in fewer words, or lower "
                    "--num_tokens"
                )
            kept, left_out = kept[2:], left_out + 1

    def add_answer(self, ids: Sequence[int]) -> None:
        """Adds the assistant's answer."""
        content = message_content(self._dialogue.tokenizer, self._dialogue.specials, ids)
        self.turns.append({"role": "assistant", "content": content})

    def reset(self) -> None:
        """Clears all messages but the system's."""
        self.turns.clear()

    def save(self, path: epath.Path) -> None:
        """Appends the answered turns to a file, as a line of JSON that mid-training reads.

        Raises:
          UserError: no message has an answer, or the file cannot be written.
        """
        if len(self.turns) < 2:
            raise UserError("there is nothing to save: no message has an answer yet")
        answered = len(self.turns) // 2 * 2
        line = json.dumps({"messages": [*self._system, *self.turns[:answered]]}) + "\n"
        try:
            before = path.read_text() if path.is_file() else ""
            if before and not before.endswith("\n"):
                line = "\n" + line
            if in_bucket(path):  # buckets cannot append
                line = before + line
            with path.open("w" if in_bucket(path) else "a") as file:
                file.write(line)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be written: {error}") from error


def message_content(
    tokenizer: Tokenizer, specials: Specials | None, ids: Sequence[int]
) -> str | list[dict]:
    """Returns an answer as the content of a message: text, or parts if it calls the calculator.

    A call without its end token, and an end token without a call, are text.
    """
    if specials is None or not {specials.python_end, specials.output_end} & set(ids):
        return tokenizer.decode(ids)
    s = specials
    closing = {
        s.python_start: (s.python_end, "python"),
        s.output_start: (s.output_end, "python_output"),
    }
    parts, text_ids, i = [], [], 0
    while i < len(ids):
        end, kind = closing.get(ids[i], (None, None))
        end_index = next((j for j in range(i + 1, len(ids)) if ids[j] == end), None)
        if end_index is None:
            text_ids.append(ids[i])
            i += 1
            continue
        if text_ids:
            parts.append({"type": "text", "text": tokenizer.decode(text_ids)})
        parts.append({"type": kind, "text": tokenizer.decode(ids[i + 1 : end_index])})
        text_ids, i = [], end_index + 1
    if text_ids:
        parts.append({"type": "text", "text": tokenizer.decode(text_ids)})
    return parts
