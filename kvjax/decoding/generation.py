"""One batch of prompts in progress.

All tokens of each prompt except the last are appended to the cache, in chunks of one width. Then
each jitted step appends one token and samples the next. The loop dispatches step n + 1 before it
reads the tokens of step n, so the device does not wait for the host.

The caller may force tokens on a sequence (a calculator's answer). By the time the host has read
token n, step n + 1 is already sampling; its token is overridden before any step appends it. The
cache is therefore the same as if the forced tokens had been sampled.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import time

import jax
import numpy as np

from kvjax import cache as cache_lib
from kvjax.decoding.engine import Engine
from kvjax.decoding.program import SamplingState
from kvjax.foundation.errors import UserError

NOT_FINITE = (
    "the model's logits are NaN or infinite: its weights are damaged, or its training diverged; "
    "try an earlier step, or float32"
)


class Generation:
    """One batch in progress; iterate over it once for its tokens.

    Attributes:
      tokens: the ids generated so far, a list per sequence, without stop tokens.
      finished: [B] bool, true for sequences that have ended.
      cache: the cache after the last dispatched step.
      timing: see `Timing`.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingState,
        num_tokens: int,
        capacity: int,
    ):
        B = len(prompts)
        self._engine = engine
        self._sampling = engine.put(sampling)
        self._ends_V = sampling.ends_V  # on the host
        self._num_tokens = num_tokens
        self._cancelled = np.zeros(B, bool)
        self._cancelled_B = engine.put(self._cancelled)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.finished = np.zeros(B, bool)
        self._forced = [collections.deque() for _ in prompts]
        self._last = np.array([prompt[-1] for prompt in prompts], np.int32)
        self._prompts = prompts
        self.timing = Timing(prompt_tokens=sum(len(prompt) for prompt in prompts))
        self.cache = cache_lib.empty(engine.cache(B, capacity))

    def load_programs(self, width: int) -> None:
        """Loads or compiles the stored programs; arguments as of `warm_up`."""
        engine, B = self._engine, len(self._prompts)
        chunk = engine.put((np.zeros((B, width), np.int32), np.zeros(B, np.int32)))
        engine.prefill.load(engine.weights, self.cache, *chunk)
        token_B, done_B = engine.put((self._last, np.zeros(B, bool)))
        engine.decode_step.load(
            engine.weights, self.cache, token_B, done_B, self._cancelled_B, self._sampling
        )

    def warm_up(self, width: int) -> None:
        """Compiles all programs by running them on no tokens.

        Args:
          width: width of prefill chunks, in tokens.
        """
        B = len(self._prompts)
        self._prefill(np.zeros((B, width), np.int32), np.zeros(B, np.int32))
        token_B, done_B = self._step(
            self._engine.put(self._last), self._engine.put(np.ones(B, bool))
        )
        self._engine.override_tokens(token_B, done_B, token_B)
        jax.block_until_ready(self.cache)

    def begin(
        self,
        width: int,
        *,
        request_time: float,
        compiling: float,
        on_chunk: Callable[[int, int], None] | None = None,
    ) -> None:
        """Dispatches the prompts, in chunks of `width` tokens, and the first step.

        Args:
          request_time: `time.perf_counter` at the request.
          compiling: seconds of compilation since the request.
          on_chunk: see `on_prefill` of `Generator.start`.
        """
        self._started = request_time + compiling
        self.timing.compiling = compiling
        # The first step appends the last prompt token and samples the next one.
        chunks = list(padded_chunks([prompt[:-1] for prompt in self._prompts], width))
        for i, (tokens_BT, counts_B) in enumerate(chunks, 1):
            self._prefill(tokens_BT, counts_B)
            if on_chunk is not None:
                jax.block_until_ready(self.cache.lengths)
                on_chunk(i, len(chunks))
        done_B = self._engine.put(np.zeros(len(self._prompts), bool))
        self._first = self._step(self._engine.put(self._last), done_B)

    def _prefill(self, tokens_BT: np.ndarray, counts_B: np.ndarray) -> None:
        engine = self._engine
        chunk = engine.put((tokens_BT, counts_B))
        self.cache = engine.prefill(engine.weights, self.cache, *chunk)

    def _step(self, token_B: jax.Array, done_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        self.cache, token_B, done_B = self._engine.decode_step(
            self._engine.weights, self.cache, token_B, done_B, self._cancelled_B, self._sampling
        )
        return token_B, done_B

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yields the new tokens of each step as (sequence, id), until all sequences have ended."""
        token_B, done_B = self._first
        for n in range(self._num_tokens):
            token_B, done_B, is_forced_B = self._with_forced_tokens(token_B, done_B)
            # Dispatched before the host waits for token n; token num_tokens is never appended.
            next_step = self._step(token_B, done_B) if n + 1 < self._num_tokens else None
            ids = jax.device_get(token_B)
            new = []
            for b in np.flatnonzero(~self.finished).tolist():
                if ids[b] < 0:
                    raise UserError(NOT_FINITE)
                if self._ends_V[ids[b]] and not is_forced_B[b]:
                    self.finished[b] = True
                else:
                    self.tokens[b].append(int(ids[b]))
                    new.append((b, int(ids[b])))
            self.timing.step(time.perf_counter() - self._started, len(new))
            if next_step is None:
                self.finished[:] = True
            yield new
            if self.finished.all():
                return
            token_B, done_B = next_step

    def force(self, b: int, tokens: Sequence[int]) -> None:
        """Queues tokens that replace the next sampled ones of sequence b; none of them ends it."""
        self._forced[b].extend(tokens)

    def _with_forced_tokens(self, token_B, done_B) -> tuple[jax.Array, jax.Array, np.ndarray]:
        """Replaces sampled tokens by the next forced token of each sequence that has one queued.

        Returns:
          Tokens [B], flags of ended sequences [B], and [B] bool, true where a token was forced.
        """
        is_forced_B = np.array([bool(queue) for queue in self._forced]) & ~self.finished
        if not is_forced_B.any():
            return token_B, done_B, is_forced_B
        forced_B = np.full(len(is_forced_B), -1, np.int32)
        for b in np.flatnonzero(is_forced_B):
            forced_B[b] = self._forced[b].popleft()
        token_B, done_B = self._engine.override_tokens(token_B, done_B, self._engine.put(forced_B))
        return token_B, done_B, is_forced_B

    def finish(self, b: int) -> None:
        """Ends sequence b; steps dispatched later append nothing to it."""
        self.finished[b] = self._cancelled[b] = True
        self._cancelled_B = self._engine.put(self._cancelled.copy())


@dataclasses.dataclass
class Timing:
    """Times of a batch in seconds; `first` and `last` count from the request, less compilation."""

    prompt_tokens: int
    compiling: float = 0.0  # duration of compilation; 0 if these sizes were compiled before
    first: float = 0.0  # when every sequence has its first token
    last: float = 0.0  # when the latest step ended
    decoded: int = 0  # tokens of all sequences after their first

    def step(self, seconds: float, tokens: int) -> None:
        """Records a step that ended after `seconds` with `tokens` new tokens."""
        if not self.first:
            self.first = seconds
        else:
            self.decoded += tokens
        self.last = seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Throughput of all sequences after the first token; None for a single token."""
        return self.decoded / (self.last - self.first) if self.decoded else None


def padded_chunks(
    sequences: Sequence[Sequence[int]], width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts sequences into chunks of `width` tokens; yields tokens_BT and counts_B of real tokens.

    Sequences that have ended have count 0.
    """
    for start in range(0, max(len(tokens) for tokens in sequences), width):
        tokens_BT = np.zeros((len(sequences), width), np.int32)
        counts_B = np.zeros(len(sequences), np.int32)
        for b, tokens in enumerate(sequences):
            chunk = tokens[start : start + width]
            tokens_BT[b, : len(chunk)], counts_B[b] = chunk, len(chunk)
        yield tokens_BT, counts_B
