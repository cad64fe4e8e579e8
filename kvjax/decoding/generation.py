"""One batch of prompts under way.

All but the last token of each prompt enter the cache in chunks of one size; then one jitted step
per token reads the cache and draws the next. The loop dispatches step n + 1, then reads the tokens
of step n, so the device never waits for the host.

The host may lay down what a sequence goes on with, as a calculator's answer: when it has read token
n, token n + 1 is being drawn, and is overruled before any step takes it in. So the cache holds what
it would hold had those tokens been drawn.
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


class Generation:
    """One batch under way: iterate for its tokens, once.

    Attributes:
      tokens: the ids generated so far, a list per sequence; a stop token is not among them.
      finished: [B] bool, whether a sequence has ended.
      cache: as of the last step dispatched.
      timing: what took how long.
    """

    def __init__(
        self, engine: Engine, prompts, choice: SamplingState, num_tokens: int, capacity: int
    ):
        B = len(prompts)
        self._engine = engine
        self._sampling = self._engine.put(choice)
        self._ends_V = choice.ends_V
        self._num_tokens = num_tokens
        self._cancelled = np.zeros(B, bool)
        self._cancelled_B = self._engine.put(self._cancelled)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.finished = np.zeros(B, bool)
        self._forced = [collections.deque() for _ in prompts]
        self._last = np.array([prompt[-1] for prompt in prompts], np.int32)
        self._prompts = prompts
        self.timing = Timing(prompt_tokens=sum(len(prompt) for prompt in prompts))
        self.cache = cache_lib.empty(engine.cache(B, capacity))

    def warm_up(self, width: int) -> None:
        """Runs both functions once with nothing to do, which compiles them."""
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
        begun: float,
        compiling: float,
        on_chunk: Callable[[int, int], None] | None = None,
    ) -> None:
        """Dispatches the prompts, in chunks of that width, and the first step.

        Args:
          begun: when the tokens were asked for, by `time.perf_counter`.
          compiling: seconds since then that count apart.
          on_chunk: see `Generator.start`.
        """
        self._started = begun + compiling
        self.timing.compiling = compiling
        chunks = list(_chunks([prompt[:-1] for prompt in self._prompts], width))
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
        engine = self._engine
        state = token_B, done_B, self._cancelled_B, self._sampling
        self.cache, token_B, done_B = engine.decode_step(engine.weights, self.cache, *state)
        return token_B, done_B

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yields once per step the new tokens as (sequence, id), until all sequences have ended."""
        token_B, done_B = self._first
        for n in range(self._num_tokens):
            token_B, done_B, is_forced_B = self._with_forced_tokens(token_B, done_B)
            following = self._step(token_B, done_B) if n + 1 < self._num_tokens else None
            ids = jax.device_get(token_B)
            new = []
            for b in np.flatnonzero(~self.finished).tolist():
                if self._ends_V[ids[b]] and not is_forced_B[b]:
                    self.finished[b] = True
                else:
                    self.tokens[b].append(int(ids[b]))
                    new.append((b, int(ids[b])))
            self.timing.step(time.perf_counter() - self._started, len(new))
            if following is None:
                self.finished[:] = True
            yield new
            if self.finished.all():
                return
            token_B, done_B = following

    def force(self, b: int, tokens: Sequence[int]) -> None:
        """What sequence b goes on with, behind what was laid down before; none of it ends it."""
        self._forced[b].extend(tokens)

    def _with_forced_tokens(self, token_B, done_B) -> tuple[jax.Array, jax.Array, np.ndarray]:
        """Drawn tokens, those that are laid down in their place, and [B] bool which those are."""
        is_forced_B = np.array([bool(queue) for queue in self._forced]) & ~self.finished
        if not is_forced_B.any():
            return token_B, done_B, is_forced_B
        pop = lambda b: self._forced[b].popleft() if is_forced_B[b] else -1
        forced_B = np.array([pop(b) for b in range(len(is_forced_B))], np.int32)
        token_B, done_B = self._engine.override_tokens(token_B, done_B, self._engine.put(forced_B))
        return token_B, done_B, is_forced_B

    def finish(self, b: int) -> None:
        """Ends sequence b: it grows no more, from the next step dispatched."""
        self.finished[b] = self._cancelled[b] = True
        self._cancelled_B = self._engine.put(self._cancelled.copy())


@dataclasses.dataclass
class Timing:
    """Seconds of one batch since it was asked for; compiling is apart from all else."""

    prompt_tokens: int
    compiling: float = 0.0  # 0 where a batch of these sizes came before
    first: float = 0.0  # until all sequences had their first token
    last: float = 0.0
    decoded: int = 0  # tokens of all sequences after their first

    def step(self, seconds: float, tokens: int) -> None:
        if not self.first:
            self.first = seconds
        else:
            self.decoded += tokens
        self.last = seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Speed of all sequences together, since the first token; None if there was only one."""
        return self.decoded / (self.last - self.first) if self.decoded else None


def _chunks(prompts: Sequence[Sequence[int]], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """tokens_BT of `size` tokens, and counts_B of real ones, until all prompts are through."""
    for start in range(0, max(len(prompt) for prompt in prompts), size):
        tokens_BT = np.zeros((len(prompts), size), np.int32)
        counts_B = np.zeros(len(prompts), np.int32)
        for b, prompt in enumerate(prompts):
            part = prompt[start : start + size]
            tokens_BT[b, : len(part)], counts_B[b] = part, len(part)
        yield tokens_BT, counts_B
