"""Multiple choice by letter: ARC and MMLU, zero-shot, in nanochat's format.

The answer is the letter that has the largest logit after the prompt, or the first of several equal
ones. Models that were not trained on conversations score near chance.
"""

from collections.abc import Sequence
import hashlib
from typing import Any

import numpy as np

from kvjax.conversation import questions
from kvjax.conversation.dialogue import Dialogue
from kvjax.conversation.questions import MultipleChoice
from kvjax.evaluate.model import BenchmarkModel
from kvjax.foundation.errors import UserError

BLOCK = 8  # batches between writes


def ask(
    model: BenchmarkModel, items: Sequence[MultipleChoice], indices: Sequence[int]
) -> list[dict[str, Any]]:
    """Evaluates some questions; returns their rows."""
    prompts = [prompt(model, items[i]) for i in indices]
    different = {items[i].letters for i in indices}
    by_letters = {each: letter_ids(model.dialogue, each) for each in different}
    candidates = [by_letters[items[i].letters] for i in indices]
    logits_of_prompts = model.choices([ids for ids, _ in prompts], candidates)
    return [
        _row(i, items[i], *prompt, logits)
        for i, prompt, logits in zip(indices, prompts, logits_of_prompts, strict=True)
    ]


def prompt(model: BenchmarkModel, item: MultipleChoice) -> tuple[list[int], bool]:
    """Returns a question's token ids, and True if it was cut."""
    text = questions.multiple_choice(item)
    rendered = model.dialogue.prompt([dict(role="user", content=text)])
    return rendered.ids, rendered.is_cut


def letter_ids(dialogue: Dialogue, letters: Sequence[str]) -> list[int]:
    """Returns the token id of each letter at the start of an answer.

    Raises:
      UserError: a letter that is not one token.
    """
    asked = [dict(role="user", content="?")]
    opened, letter_tokens = dialogue.prompt(asked).ids, []
    for letter in letters:
        begun = dialogue.begun(asked, letter)
        ids = begun[len(opened) :] if begun[: len(opened)] == opened else []
        if len(ids) != 1:  # the template writes more before the answers that it is given
            ids = dialogue.tokenizer.encode(letter)
        if len(ids) != 1:
            raise UserError(
                f"the letter {letter!r} is {len(ids)} tokens in this tokenizer: answers cannot be "
                "compared by letter. Remove arc_easy, arc_challenge and mmlu from --tasks"
            )
        letter_tokens += ids
    return letter_tokens


def check(model: BenchmarkModel, items: Sequence[MultipleChoice]) -> None:
    """Raises a UserError if a letter of the questions is not one token."""
    letter_ids(model.dialogue, sorted({letter for item in items for letter in item.letters}))


def _row(
    index: int, item: MultipleChoice, ids: list[int], is_cut: bool, logits: np.ndarray
) -> dict:
    chosen = int(np.argmax(logits))
    ties = int(np.sum(logits == logits[chosen])) - 1
    row = {
        "index": index,
        "prompt": prompt_hash(ids),
        "letters": "".join(item.letters),
        "logits": [round(float(z), 5) for z in logits],
        "chosen": item.letters[chosen],
        "answer": item.answer,
        "right": item.letters[chosen] == item.answer,
    }
    if ties:
        row["ties"] = ties
    if is_cut:
        row["cut"] = True
    return row


def prompt_hash(ids: Sequence[int]) -> str:
    """Returns a question's row key: a digest of its prompt's token ids."""
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:16]
