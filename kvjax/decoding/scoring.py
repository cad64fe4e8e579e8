"""Log-likelihoods of given tokens, computed in chunks over a cache.

Sequences are sorted by length and run in batches of one size. The chunk width (16 to 128 tokens)
follows from the batch's longest sequence, and caches hold 128 * 2^i tokens, so that few programs
are compiled and little padding is computed. Results are in the order of the arguments.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as cache_lib
from kvjax.cache import Cache
from kvjax.decoding.generation import NOT_FINITE, padded_chunks
from kvjax.decoding.generator import Generator, chunk_width
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.model.decoder import Decoder

BATCH = 8  # sequences per batch
WIDTH = 128  # largest width of a chunk, in tokens


class _Batch(NamedTuple):
    indices: list[int]  # of the sequences in the request
    width: int  # of chunks, in tokens
    tokens: list[Sequence[int]]  # sequences, and empty ones up to the batch size
    cache: Cache  # empty


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores of a continuation's tokens."""

    nats: np.ndarray  # -log p of each token, float32 or wider
    greedy: np.ndarray  # bool, true where the token is the most likely one

    @property
    def log_likelihood(self) -> float:
        return -float(np.sum(self.nats, dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        return bool(np.all(self.greedy))


class Scorer:
    """Scores sequences with the weights of a generator.

    Args:
      batch: sequences per batch.
    """

    def __init__(self, generator: Generator, *, batch: int = BATCH):
        at_least("batch", batch, 1)
        self._generator, self._engine = generator, generator.engine
        self._batch = batch
        self._score = self._engine.compiled(_score)
        self._candidate_logits = self._engine.compiled(_candidate_logits)

    def continuations(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """Scores every continuation after its context.

        Args:
          pairs: (context, continuation) as token ids; contexts are not empty.

        Raises:
          UserError: an empty context, an id outside the vocabulary, or more tokens than the
            model's positions or the memory allow.
        """
        sequences = [[*context, *continuation] for context, continuation in pairs]
        inputs = [sequence[:-1] for sequence in sequences]  # the last token is only a target
        self._check([context for context, _ in pairs], sequences, inputs)
        scores: list[Scored | None] = [None] * len(pairs)
        for indices, width, tokens, cache in self._batches(inputs):
            # Position t predicts token t + 1; positions before `first` predict context tokens.
            first = min(len(pairs[i][0]) for i in indices) - 1
            nats = [[np.zeros(0, np.float32)] for _ in indices]
            greedy = [[np.zeros(0, bool)] for _ in indices]
            for number, (tokens_BT, counts_B) in enumerate(padded_chunks(tokens, width)):
                start = number * width
                if start + width <= first:  # no continuation yet: logits are not needed
                    chunk = self._engine.put((tokens_BT, counts_B))
                    cache = self._engine.prefill(self._engine.weights, cache, *chunk)
                    continue
                targets_BT = np.zeros_like(tokens_BT)
                for b, i in enumerate(indices):
                    targets = sequences[i][start + 1 : start + 1 + width]
                    targets_BT[b, : len(targets)] = targets
                chunk = self._engine.put((tokens_BT, counts_B, targets_BT))
                cache, *out = self._score(self._engine.weights, cache, *chunk)
                nats_BT, greedy_BT = jax.device_get(out)
                for b in range(len(indices)):
                    nats[b].append(nats_BT[b, : counts_B[b]])
                    greedy[b].append(greedy_BT[b, : counts_B[b]])
            for b, i in enumerate(indices):
                size = len(pairs[i][1])
                scores[i] = Scored(
                    _check_finite(_last(np.concatenate(nats[b]), size)),
                    _last(np.concatenate(greedy[b]), size),
                )
        return scores

    def choices(
        self,
        prompts: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """Returns the logits of each prompt's candidates as its next token, float32 or wider.

        Raises:
          UserError: see `continuations`.
        """
        pairs = zip(prompts, candidates, strict=True)
        self._check(prompts, [[*prompt, *ids] for prompt, ids in pairs], prompts)
        num_candidates = max((len(ids) for ids in candidates), default=0)
        logits: list[np.ndarray | None] = [None] * len(prompts)
        for indices, width, tokens, cache in self._batches(prompts):
            ids_BC = np.zeros((self._batch, num_candidates), np.int32)
            for b, i in enumerate(indices):
                ids_BC[b, : len(candidates[i])] = candidates[i]
            for number, (tokens_BT, counts_B) in enumerate(padded_chunks(tokens, width)):
                chunk = self._engine.put((tokens_BT, counts_B, ids_BC))
                cache, logits_BC = self._candidate_logits(self._engine.weights, cache, *chunk)
                logits_BC = jax.device_get(logits_BC)
                for b, i in enumerate(indices):
                    is_last = number * width + counts_B[b] == len(prompts[i])
                    if counts_B[b] and is_last:
                        logits[i] = _check_finite(logits_BC[b, : len(candidates[i])])
        return logits

    def _batches(self, inputs: Sequence[Sequence[int]]) -> Iterator[_Batch]:
        """Yields batches of one size, longest sequences first."""
        order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i]))
        for first in range(0, len(order), self._batch):
            indices = order[first : first + self._batch]
            tokens = [inputs[i] for i in indices] + [[]] * (self._batch - len(indices))
            longest = len(tokens[0])
            capacity = self._generator.cache_capacity(self._batch, longest)
            cache = cache_lib.empty(self._engine.cache(self._batch, capacity))
            yield _Batch(indices, chunk_width(longest, min(WIDTH, capacity)), tokens, cache)

    def _check(
        self,
        contexts: Sequence[Sequence[int]],
        sequences: Sequence[Sequence[int]],
        inputs: Sequence[Sequence[int]],
    ) -> None:
        """Raises a UserError for an empty context, a bad token id or too many input tokens.

        Args:
          sequences: all token ids, inputs and targets.
        """
        V, limit = self._generator.config.vocab_size, self._generator.positions
        triples = zip(contexts, sequences, inputs, strict=True)
        for i, (context, sequence, tokens) in enumerate(triples, 1):
            if not len(context):
                raise UserError(f"sequence {i} has an empty context: start it with BOS")
            if min(sequence) < 0 or max(sequence) >= V:
                raise UserError(f"sequence {i}: the vocabulary has ids 0 to {V - 1}")
            if limit is not None and len(tokens) > limit:
                raise UserError(
                    f"sequence {i} has {len(tokens)} input tokens, more than the model's {limit} "
                    "positions"
                )


def _check_finite(values: np.ndarray) -> np.ndarray:
    """Returns the values; raises a UserError if one is NaN or infinite."""
    if not np.isfinite(values).all():
        raise UserError(NOT_FINITE)
    return values


def _last(values: np.ndarray, count: int) -> np.ndarray:
    return values[len(values) - count :]  # [-0:] would be all of them


def _score(weights, cache, tokens_BT, counts_B, targets_BT, *, graph, implementation):
    """Appends tokens; returns the cache, nats of `targets_BT`, and whether each is the argmax."""
    decoder: Decoder = nnx.merge(graph, weights)
    x_BTD, cache = decoder(tokens_BT, cache, counts_B, implementation=implementation)

    def score_row(row):
        x_TD, targets_T = row
        z_TV = decoder.logits(x_TD[None])[0]
        target_T = jnp.take_along_axis(z_TV, targets_T[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(z_TV, axis=-1) - target_T, jnp.argmax(z_TV, axis=-1) == targets_T

    # Row by row, so that only [T, V] logits are in memory.
    nats_BT, greedy_BT = jax.lax.map(score_row, (x_BTD, targets_BT))
    return cache, nats_BT, greedy_BT


def _candidate_logits(weights, cache, tokens_BT, counts_B, ids_BC, *, graph, implementation):
    """Appends tokens; returns the cache and the logits [B, C] of ids after the last token."""
    decoder: Decoder = nnx.merge(graph, weights)
    x_BTD, cache = decoder(tokens_BT, cache, counts_B, implementation=implementation)
    last_B11 = jnp.maximum(counts_B - 1, 0)[:, None, None]
    z_BV = decoder.logits(jnp.take_along_axis(x_BTD, last_B11, axis=1))[:, 0]
    return cache, jnp.take_along_axis(z_BV, ids_BC, axis=1)
