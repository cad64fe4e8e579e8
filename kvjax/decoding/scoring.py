"""How likely a model finds given tokens, read through its cache: nothing is drawn.

Sequences are sorted by length and read in batches of one size, in chunks as wide as a batch's
longest needs (16 to 128), into caches of 128 · 2^i tokens: little is compiled, and little is
padding. Results come in the order asked.
"""

from collections.abc import Iterator, Sequence
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as cache_lib
from kvjax.cache import Cache
from kvjax.decoding.generator import Generator, chunk_width
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.model.decoder import Decoder

BATCH = 8  # sequences at once
WIDTH = 128  # of their tokens, at most


@dataclasses.dataclass(frozen=True)
class Scored:
    """What a model makes of a continuation."""

    nats: np.ndarray  # -log p of each of its tokens, float32 or wider
    greedy: np.ndarray  # bool, whether each is the most likely one

    @property
    def log_likelihood(self) -> float:
        return -float(np.sum(self.nats, dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        return bool(np.all(self.greedy))


class Scorer:
    """Scores sequences with a generator's weights and programs of its own.

    Args:
      batch: sequences that are read at once.
    """

    def __init__(self, generator: Generator, *, batch: int = BATCH):
        at_least("batch", batch, 1)
        self._generator, self._engine = generator, generator.engine
        self._batch = batch
        self._score = self._engine.compiled(_score)
        self._choose = self._engine.compiled(_choose)

    def continuations(
        self,
        asked: Sequence[tuple[Sequence[int], Sequence[int]]],
    ) -> list[Scored]:
        """The nats of every continuation after its context.

        Args:
          asked: (context, continuation) as token ids; a context has one at least, and what is
            scored is as long as the model's positions allow.

        Raises:
          UserError: an empty context, an id that the vocabulary does not have, more tokens than
            there are positions or memory for.
        """
        sequences = [[*context, *continuation] for context, continuation in asked]
        self._check([context for context, _ in asked], sequences)
        found: list[Scored | None] = [None] * len(asked)
        for chosen, chunks in self._batches([s[:-1] for s in sequences]):
            # What position t says of token t + 1, from where the first continuation begins.
            first = min(len(asked[i][0]) for i in chosen) - 1
            nats = [[np.zeros(0, np.float32)] for _ in chosen]
            greedy = [[np.zeros(0, bool)] for _ in chosen]
            for cache, start, tokens_BT, counts_B in chunks:
                if start + tokens_BT.shape[1] <= first:  # nothing is asked here: no logits
                    given = self._engine.put((tokens_BT, counts_B))
                    cache.now = self._engine.prefill(self._engine.weights, cache.now, *given)
                    continue
                targets_BT = np.zeros_like(tokens_BT)
                for b, i in enumerate(chosen):
                    part = sequences[i][start + 1 : start + 1 + tokens_BT.shape[1]]
                    targets_BT[b, : len(part)] = part
                given = self._engine.put((tokens_BT, counts_B, targets_BT))
                new, *out = self._score(self._engine.weights, cache.now, *given)
                cache.now = new
                nats_BT, greedy_BT = jax.device_get(out)
                for b in range(len(chosen)):
                    nats[b].append(nats_BT[b, : counts_B[b]])
                    greedy[b].append(greedy_BT[b, : counts_B[b]])
            for b, i in enumerate(chosen):
                size = len(asked[i][1])
                of = lambda parts, size=size: _last(np.concatenate(parts), size)
                found[i] = Scored(_finite(of(nats[b])), of(greedy[b]))
        return found

    def choices(
        self,
        prompts: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """The logits of each prompt's candidates as its next token, float32 or wider.

        Raises:
          UserError: as `continuations`.
        """
        self._check(prompts, [[*p, *c] for p, c in zip(prompts, candidates, strict=True)])
        most = max((len(ids) for ids in candidates), default=0)
        found: list[np.ndarray | None] = [None] * len(prompts)
        for chosen, chunks in self._batches(prompts):
            ids_BC = np.zeros((self._batch, most), np.int32)
            for b, i in enumerate(chosen):
                ids_BC[b, : len(candidates[i])] = candidates[i]
            for cache, start, tokens_BT, counts_B in chunks:
                given = self._engine.put((tokens_BT, counts_B, ids_BC))
                cache.now, logits_BC = self._choose(self._engine.weights, cache.now, *given)
                logits_BC = jax.device_get(logits_BC)
                for b, i in enumerate(chosen):
                    if counts_B[b] and start + counts_B[b] == len(prompts[i]):
                        found[i] = _finite(logits_BC[b, : len(candidates[i])])
        return found

    def _batches(self, fed: Sequence[Sequence[int]]) -> Iterator:
        """Yields each batch: the indices of its sequences, and the chunks that they are fed in."""
        order = sorted(range(len(fed)), key=lambda i: -len(fed[i]))
        for first in range(0, len(order), self._batch):
            chosen = order[first : first + self._batch]
            tokens = [fed[i] for i in chosen] + [[]] * (self._batch - len(chosen))
            capacity = self._generator.cache_capacity(self._batch, len(tokens[0]))
            cache = _CurrentCache(cache_lib.empty(self._engine.cache(self._batch, capacity)))
            width = chunk_width(len(tokens[0]), min(WIDTH, capacity))
            yield chosen, _chunks(cache, tokens, width)

    def _check(self, contexts: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]]) -> None:
        """Raises a UserError for what cannot be scored."""
        V, limit = self._generator.config.vocab_size, self._generator.positions
        for i, (context, sequence) in enumerate(zip(contexts, sequences, strict=True), 1):
            if not len(context):
                raise UserError(f"sequence {i} has an empty context: start it with BOS")
            if min(sequence) < 0 or max(sequence) >= V:
                raise UserError(f"sequence {i}: the vocabulary has ids 0 to {V - 1}")
            if limit is not None and len(sequence) - 1 > limit:
                raise UserError(
                    f"sequence {i} has {len(sequence)} tokens, and the model positions for {limit}"
                )


def _finite(values: np.ndarray) -> np.ndarray:
    """Returns the values; a UserError if one is NaN or infinite: nothing follows from them."""
    if not np.isfinite(values).all():
        raise UserError(
            "the model's logits are NaN or infinite: its weights are damaged, or its training "
            "diverged: take an earlier --step, or --dtype=float32"
        )
    return values


@dataclasses.dataclass
class _CurrentCache:
    """A cache that every step replaces."""

    now: Cache


def _chunks(cache: _CurrentCache, tokens: Sequence[Sequence[int]], width: int) -> Iterator:
    for start in range(0, len(tokens[0]), width):  # the first is the longest
        tokens_BT = np.zeros((len(tokens), width), np.int32)
        counts_B = np.zeros(len(tokens), np.int32)
        for b, ids in enumerate(tokens):
            part = ids[start : start + width]
            tokens_BT[b, : len(part)], counts_B[b] = part, len(part)
        yield cache, start, tokens_BT, counts_B


def _last(values: np.ndarray, count: int) -> np.ndarray:
    return values[len(values) - count :]


def _score(weights, cache, tokens_BT, counts_B, targets_BT, *, graph, implementation):
    """The cache with more tokens; nats [B, T] of what follows each, and whether it is likeliest."""
    decoder: Decoder = nnx.merge(graph, weights)
    x_BTD, cache = decoder(tokens_BT, cache, counts_B, implementation=implementation)

    def of_row(row):
        x_TD, targets_T = row
        z_TV = decoder.logits(x_TD[None])[0]
        target_T = jnp.take_along_axis(z_TV, targets_T[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(z_TV, axis=-1) - target_T, jnp.argmax(z_TV, axis=-1) == targets_T

    nats_BT, greedy_BT = jax.lax.map(of_row, (x_BTD, targets_BT))  # logits of one row at a time
    return cache, nats_BT, greedy_BT


def _choose(weights, cache, tokens_BT, counts_B, ids_BC, *, graph, implementation):
    """The cache with more tokens, and the logits [B, C] of ids after the last of them."""
    decoder: Decoder = nnx.merge(graph, weights)
    x_BTD, cache = decoder(tokens_BT, cache, counts_B, implementation=implementation)
    last_B11 = jnp.maximum(counts_B - 1, 0)[:, None, None]
    z_BV = decoder.logits(jnp.take_along_axis(x_BTD, last_B11, axis=1))[:, 0]
    return cache, jnp.take_along_axis(z_BV, ids_BC, axis=1)
