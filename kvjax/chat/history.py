"""What was said so far, and how much of it a model is shown."""

from collections.abc import Sequence
import json

from etils import epath

from kvjax.conversation.dialogue import Dialogue
from kvjax.conversation.specials import Specials
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket


class History:
    """The messages of a conversation, in the order that they were said.

    Args:
      dialogue: how the model is talked to.
      room: tokens that a prompt may have.
      system: what the assistant is told first; "": nothing.
    """

    def __init__(self, dialogue: Dialogue, room: int, system: str = ""):
        self._dialogue, self._room = dialogue, room
        self._system = [dict(role="system", content=system)] if system else []
        self.turns: list[dict] = []

    @property
    def messages(self) -> list[dict]:
        return [*self._system, *self.turns]

    def add_question(self, text: str) -> tuple[list[int], int]:
        """Adds the user's message; the ids of the prompt, and how many turns it leaves out.

        A turn is a message of the user's and its answer; the oldest are left out first.

        Raises:
          UserError: the message alone is longer than the room. Nothing is added.
        """
        asked = dict(role="user", content=text)
        kept = [*self.turns, asked]
        gone = 0
        while True:
            ids = self._dialogue.prompt([*self._system, *kept], "your message").ids
            if len(ids) <= self._room:
                self.turns.append(asked)
                return ids, gone
            if len(kept) == 1:
                raise UserError(
                    f"the message has {len(ids):,} tokens with what stands around it, and there is "
                    f"room for {self._room:,}: say it in fewer words, or lower --num_tokens"
                )
            kept, gone = kept[2:], gone + 1

    def add_answer(self, ids: Sequence[int]) -> None:
        """Adds the assistant's answer."""
        content = message_content(self._dialogue.tokenizer, self._dialogue.specials, ids)
        self.turns.append(dict(role="assistant", content=content))

    def reset(self) -> None:
        """Forgets everything but the system's message."""
        self.turns.clear()

    def save(self, path: epath.Path) -> None:
        """Adds the conversation to a file, as a line of JSON that mid-training reads.

        Raises:
          UserError: nothing was said, or the file cannot be written.
        """
        if len(self.turns) < 2:
            raise UserError("there is nothing to save: no message has an answer yet")
        whole = len(self.turns) // 2 * 2
        line = json.dumps(dict(messages=[*self._system, *self.turns[:whole]])) + "\n"
        try:
            if in_bucket(path):  # where nothing can be added to a file
                line = (path.read_text() if path.exists() else "") + line
            with path.open("w" if in_bucket(path) else "a") as file:
                file.write(line)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be written: {error}") from error


def message_content(
    tokenizer: Tokenizer, specials: Specials | None, ids: Sequence[int]
) -> str | list[dict]:
    """An answer as a message's content: its text, or parts if it called the calculator.

    A call without an end, and an end without a call, are text.
    """
    if specials is None or not {specials.python_end, specials.output_end} & set(ids):
        return tokenizer.decode(ids)
    s = specials
    closes = {
        s.python_start: (s.python_end, "python"),
        s.output_start: (s.output_end, "python_output"),
    }
    found, text, i = [], [], 0
    while i < len(ids):
        end, kind = closes.get(ids[i], (None, None))
        stop = next((j for j in range(i + 1, len(ids)) if ids[j] == end), None)
        if stop is None:
            text.append(ids[i])
            i += 1
            continue
        if text:
            found.append(dict(type="text", text=tokenizer.decode(text)))
        found.append(dict(type=kind, text=tokenizer.decode(ids[i + 1 : stop])))
        text, i = [], stop + 1
    if text:
        found.append(dict(type="text", text=tokenizer.decode(text)))
    return found
