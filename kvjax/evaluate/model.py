"""The model that is asked, behind three methods: tests put oracles in its place."""

from collections.abc import Sequence
import dataclasses
from typing import Protocol

import numpy as np

from kvjax.conversation.dialogue import Dialogue
from kvjax.data.tokenizer import Tokenizer
from kvjax.decoding import answers as answers_lib
from kvjax.decoding.answers import Answer
from kvjax.decoding.generator import Generator
from kvjax.decoding.scoring import Scored, Scorer


class BenchmarkModel(Protocol):
    """What tasks ask of.

    Attributes:
      dialogue: how it is talked to.
      positions: how many tokens it has positions for; None: any number.
      batch: prompts that are answered side by side.
    """

    tokenizer: Tokenizer
    dialogue: Dialogue
    positions: int | None
    batch: int

    def choices(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """The logits of each prompt's candidates as its next token."""

    def continuations(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Scored]:
        """What it makes of each continuation after its context."""

    def answers(self, prompts: Sequence[Sequence[int]], **options) -> list[Answer]:
        """See `kvjax.decoding.answers.answers`."""


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What is known of a model before its weights are read."""

    tokenizer: Tokenizer
    dialogue: Dialogue
    positions: int | None


class CachedModel:
    """A model with a cache."""

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, dialogue: Dialogue, *, batch: int
    ):
        self.tokenizer, self.dialogue, self.batch = tokenizer, dialogue, batch
        self.positions = generator.positions
        self._generator = generator
        self._scorer = Scorer(generator, batch=batch)

    def choices(self, prompts, candidates) -> list[np.ndarray]:
        return self._scorer.choices(prompts, candidates)

    def continuations(self, sequences) -> list[Scored]:
        return self._scorer.continuations(sequences)

    def answers(self, prompts, **options) -> list[Answer]:
        """Batches of one size: a short one is filled with its last prompt, which compiles less."""
        count = len(prompts)
        prompts = [*prompts, *[prompts[-1]] * (self.batch - count)]
        found = answers_lib.answers(self._generator, self.dialogue, prompts, **options)
        return found[:count]
