"""Generates tokens with a KV cache, for a batch of prompts of any lengths.

`Generator` checks a request, rounds the sizes of cache and prefill chunks so that few programs are
compiled, and starts a `Generation` (generation.py), which runs on an `Engine` (engine.py).
"""

from collections.abc import Callable, Sequence
import operator
import time
import zlib

import jax
import numpy as np

from kvjax import cache as cache_lib
from kvjax.cache.cache import LANES
from kvjax.decoding import program
from kvjax.decoding.engine import Engine
from kvjax.decoding.generation import Generation
from kvjax.decoding.program import SamplingState
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer

CHUNK = 128  # largest width of a prefill chunk, in tokens
MIN_CHUNK = 16  # smallest width, for short prompts


class Generator:
    """A model prepared for generation.

    Programs are compiled once for each number of sequences, capacity, and width of prefill chunks
    (16, 32, 64 or 128 tokens, by the longest prompt).
    """

    def __init__(
        self,
        model: Transformer,
        compute: Compute = Compute(),
        *,
        chunk: int = CHUNK,
        implementation: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
        stored: bool = False,
    ):
        """Casts and slices the model's weights, on its devices or replicated over `mesh`.

        Weights outside layer groups that already have the compute dtype are shared with the model,
        so they must not be donated.

        Args:
          chunk: largest width of a prefill chunk, in tokens.
          implementation: of decode attention, see `kvjax.kernels.decode_attention.api`; prefill
            never uses a kernel.
          mesh: devices that the cache's tokens are sharded over, see `decoding.program.make_mesh`.
          stored: keep compiled programs on disk, and load those of an earlier process, see
            `decoding.stored`.

        Raises:
          UserError: an invalid option, or a kernel that does not run on the model's devices.
          ValueError: see `decoding.program.replicated`.
        """
        at_least("chunk", chunk, 1)
        self.engine = Engine(
            model, compute, implementation=implementation, mesh=mesh, stored=stored
        )
        self.config: TransformerConfig = model.config
        self.compute = compute
        self.chunk = chunk
        self.chips = self.engine.chips
        self._compiled: set[tuple[int, int, int]] = set()  # (sequences, capacity, chunk width)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        sampling: Sampling = Sampling(),
        seed: int = 0,
        stop_tokens: Sequence[int] = (),
        capacity: int = 0,
        on_compile: Callable[[], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Starts generating up to `num_tokens` tokens after each prompt.

        A sequence depends on the seed and its prompt, not on its batch (up to rounding); equal
        prompts in one batch get different random streams.

        Args:
          prompts: token ids, at least one each; lengths may differ.
          stop_tokens: ids that end a sequence; they are not part of it.
          capacity: tokens per sequence that the cache holds; 0: the number needed, rounded up to
            128 * 2^i per chip.
          on_compile: called before compilation, if these sizes are new.
          on_prefill: called after each prefill chunk with its number and the number of chunks; the
            host then waits for every chunk.

        Raises:
          UserError: an id outside the vocabulary; no prompt, or an empty one; more tokens than
            the capacity, the model's positions or the memory allow.
        """
        request_time = time.perf_counter()
        check_options(num_tokens=num_tokens, seed=seed, capacity=capacity)
        prompts, stop_tokens = self._check_ids(prompts, stop_tokens)
        lengths = np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        needed = longest + num_tokens - 1  # the last token is sampled, but never appended
        limit = self.positions
        if limit is not None and needed > limit:
            raise UserError(
                f"a prompt of {longest} tokens and num_tokens = {num_tokens}: the model's "
                f"{self.config.block.positions} positions end after {limit} tokens; shorten the "
                "prompt or generate fewer tokens"
            )
        program.check_capacity(self.config, capacity, self.chips, key="capacity")
        if capacity and longest > capacity:
            raise UserError(
                f"prompt {lengths.argmax() + 1} has {longest} tokens and capacity = {capacity}: "
                "give a larger capacity (0: as many as needed) or a shorter prompt"
            )
        if capacity:
            cache_lib.check_capacity(lengths, np.full_like(lengths, num_tokens - 1), capacity)
        slots = self.cache_capacity(len(prompts), needed, capacity)
        # Prefill leaves out the last token.
        width = chunk_width(longest - 1, min(self.chunk, slots))
        ends_V = np.zeros(self.config.vocab_size, bool)
        ends_V[stop_tokens] = True
        streams_B = np.array(_streams(prompts), np.uint32)

        def make() -> Generation:
            state = SamplingState(sampling.parameters(), jax.random.key(seed), streams_B, ends_V)
            return Generation(self.engine, prompts, state, num_tokens, slots)

        compiling, generation = 0.0, make()
        if (len(prompts), slots, width) not in self._compiled:
            compile_start = time.perf_counter()
            if on_compile is not None:
                on_compile()
            if self.engine.stored:
                generation.load_programs(width)
            else:
                generation.warm_up(width)
                generation = make()
            self._compiled.add((len(prompts), slots, width))
            compiling = time.perf_counter() - compile_start
        times = dict(request_time=request_time, compiling=compiling)
        generation.begin(width, **times, on_chunk=on_prefill)
        return generation

    @property
    def positions(self) -> int | None:
        """Largest number of tokens in a sequence; None without a limit."""
        return max_positions(self.config, self.chips)

    def cache_capacity(self, batch: int, tokens: int, capacity: int = 0) -> int:
        """Returns the capacity of a cache for `tokens` per sequence: 128 * 2^i per chip.

        Args:
          capacity: if not 0, the capacity instead of 128 * 2^i per chip.

        Raises:
          UserError: the cache does not fit into memory.
        """
        slots = capacity or _round(-(-tokens // self.chips)) * self.chips
        slots = min(slots, program.max_capacity(self.config, self.chips) or slots)
        return self._check_memory(batch, slots)

    def _check_ids(
        self, prompts: Sequence[Sequence[int]], stop_tokens: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """Returns prompts and stop tokens as lists of ints, all in the vocabulary."""
        V = self.config.vocab_size
        if not len(prompts):
            raise UserError("no prompts: give at least one")
        allowed = f"the vocabulary has {V} tokens, ids 0 to {V - 1}"
        for b, prompt in enumerate(prompts, 1):
            if not len(prompt):
                raise UserError(f"prompt {b} has no tokens: start it with the tokenizer's BOS")
            for i, token in enumerate(prompt, 1):
                if not 0 <= token < V:
                    raise UserError(f"prompt {b}, token {i}: no id {token}; {allowed}")
        for token in stop_tokens:
            if not 0 <= token < V:
                raise UserError(f"stop token {token}: no such id; {allowed}")
        return [list(map(operator.index, p)) for p in prompts], list(stop_tokens)

    def _check_memory(self, batch: int, capacity: int) -> int:
        """Returns the allocated capacity; raises a UserError if the cache does not fit."""
        cache = self.engine.cache(batch, capacity)
        needed = cache_lib.live_bytes(cache) // self.chips
        free = runtime.memory_per_device()  # on a CPU already without the memory in use
        device = jax.local_devices()[0]
        if device.platform != "cpu":
            free -= device.memory_stats()["bytes_in_use"]
        if needed > free:
            each = f" on each of {self.chips} chips" if self.chips > 1 else ""
            raise UserError(
                f"a cache of {batch} sequences of {cache.capacity:,} tokens needs "
                f"{needed / 1e9:,.1f} GB of {free / 1e9:,.1f} GB{each}: generate fewer tokens, "
                "lower capacity (0: as many as needed), or give fewer prompts at once"
            )
        return cache.capacity


def chunk_width(tokens: int, most: int) -> int:
    """Returns the width of prefill chunks for `tokens` per sequence: 16, 32, 64, ... up to `most`.

    Wider chunks compute more padding; more widths compile more programs.
    """
    power_of_two = 1 << (tokens - 1).bit_length()
    return min(most, max(MIN_CHUNK, power_of_two))


def check_options(*, num_tokens: int, seed: int, capacity: int) -> None:
    """Raises a UserError for options of `Generator.start` that are invalid for every model."""
    at_least("num_tokens", num_tokens, 1)
    at_least("capacity", capacity, 0)
    at_least("seed", seed, 0)
    if seed >= 1 << 32:
        raise UserError(f"seed = {seed}: must be below 2**32")


def max_positions(config: TransformerConfig, chips: int = 1) -> int | None:
    """Returns the largest sequence length with the cache on `chips` chips; None without a limit."""
    learned = config.block.max_positions if config.block.positions == "learned" else None
    limits = (learned, program.max_capacity(config, chips))
    return min((limit for limit in limits if limit is not None), default=None)


def _round(tokens: int) -> int:
    """Rounds up to 128 * 2^i, so that few sizes are compiled."""
    return LANES << (-(-tokens // LANES) - 1).bit_length()


def _streams(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns a random stream per sequence: the CRC of its prompt, seeded by earlier duplicates."""
    duplicates, streams = {}, []
    for prompt in prompts:
        content = np.asarray(prompt, np.int32).tobytes()
        duplicates[content] = duplicates.get(content, -1) + 1
        streams.append(zlib.crc32(content, duplicates[content]))
    return streams
