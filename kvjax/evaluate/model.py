"""The model under evaluation: an interface of three methods, and its implementation."""

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
    """A model that tasks are evaluated on.

    Attributes:
      dialogue: chat format.
      positions: maximum number of positions; None: unlimited.
      batch: prompts per batch.
    """

    tokenizer: Tokenizer
    dialogue: Dialogue
    positions: int | None
    batch: int

    def choices(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Returns the logits of each prompt's candidates as its next token."""

    def continuations(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Scored]:
        """Scores each continuation after its context."""

    def answers(self, prompts: Sequence[Sequence[int]], **options) -> list[Answer]:
        """Generates answers, see `kvjax.decoding.answers.answers`."""


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Properties of a model that are known before its weights are read."""

    tokenizer: Tokenizer
    dialogue: Dialogue
    positions: int | None


class CachedModel:
    """A model that decodes with a cache."""

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
        """Generates answers. Pads the batch, so that only one program is compiled."""
        count = len(prompts)
        prompts = [*prompts, *[prompts[-1]] * (self.batch - count)]
        results = answers_lib.answers(self._generator, self.dialogue, prompts, **options)
        return results[:count]
