"""Tokens from a model with a KV cache, for a batch of prompts of any lengths.

All but the last token of each prompt enter the cache in chunks of one size; then one jitted step
per token reads the cache and draws the next. The loop dispatches step n + 1, then reads the tokens
of step n, so the device never waits for the host.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import operator
import time
import zlib

from flax import nnx
import jax
import numpy as np

from kvjax import cache as cache_lib
from kvjax.cache import Cache
from kvjax.cache.cache import LANES
from kvjax.decoding import program
from kvjax.decoding.program import Choice
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention import api
from kvjax.kernels.decode_attention import sharded
from kvjax.model.config import TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer

CHUNK = 128  # prompt tokens per sequence that enter the cache at once, at most
NARROWEST = 16  # of those chunks, where prompts are short


class Generator:
    """A model made ready to generate: weights in the dtype it computes in, and jitted functions.

    What is compiled depends on the number of sequences, the capacity, and for prefill the width of
    its chunks: 16, 32, 64 or 128 tokens, as the longest prompt needs. Nothing else.
    """

    def __init__(
        self,
        model: Transformer,
        compute: Compute = Compute(),
        *,
        chunk: int = CHUNK,
        implementation: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        """Copies the weights, to where the model has them or, whole, to every device of a mesh.

        Args:
          chunk: prompt tokens per sequence and prefill step, at most.
          implementation: of decode attention, see `kvjax.kernels.decode_attention.api`; a kernel
            decodes only, prompts are read by "xla".
          mesh: devices that the tokens of a cache are split over, see `decoding.program.make_mesh`.

        Raises:
          UserError: an option that cannot be, or a kernel for other devices than the model's.
          ValueError: a mesh of several devices that are not along one axis "cache".
        """
        if implementation is not None:
            one_of("implementation", implementation, tuple(api.IMPLEMENTATIONS))
        at_least("chunk", chunk, 1)
        if not model.config.block.causal:
            raise UserError("config.model.causal = False: only a causal model can generate")
        self.config: TransformerConfig = model.config
        self.compute = compute
        self.chunk = chunk
        model_graph, params = nnx.split(model)
        make = lambda params: Decoder(nnx.merge(model_graph, params), compute)
        graph, _ = nnx.split(nnx.eval_shape(make, params))
        self.weights = jax.jit(lambda params: nnx.to_pure_dict(nnx.state(make(params))))(params)
        self.sharding = _everywhere(self.weights)
        if mesh is not None:
            self.sharding = program.on_every(mesh)
            self.weights = jax.device_put(self.weights, self.sharding)
        self.chips = program.chips_of(self.sharding)
        self._compiled: set[tuple[int, int, int]] = set()  # sequences, capacity, width of chunks
        implementation = _for_devices(implementation, self.sharding.device_set, self.chips)
        reading = "xla" if api.is_kernel(implementation) else implementation
        options = dict(graph=graph, whole=self.sharding)
        ready = lambda f, name: program.compiled(f, implementation=name, **options)
        self._prefill = ready(program.prefill, reading)
        self._decode_step = ready(program.decode_step, implementation)

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
    ) -> "Generation":
        """Generation of up to `num_tokens` tokens after each prompt.

        A seed gives a prompt the same text whatever the batch it is in, up to rounding; equal
        prompts in one batch get different texts.

        Args:
          prompts: token ids, at least one each; lengths may differ.
          stop_tokens: ids that end a sequence; they are not part of it.
          capacity: of the cache, in tokens per sequence; 0: what is needed, as 128 · 2^i per chip.
          on_compile: called before anything is compiled, if anything has to be.
          on_prefill: called with the chunks of the prompts that are read, and how many there are,
            after each; the host then waits for every chunk.

        Raises:
          UserError: an id the vocabulary does not have, no prompt or an empty one, more tokens
            than the capacity, the model's positions or the memory hold, or a capacity beyond those.
        """
        begun = time.perf_counter()
        check_options(num_tokens=num_tokens, seed=seed, capacity=capacity)
        prompts, stop_tokens = self._check_ids(prompts, stop_tokens)
        lengths = np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        needed = longest + num_tokens - 1  # the last token is never appended
        limit = max_positions(self.config, self.chips)
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
                "give a larger capacity (0: what is needed) or a shorter prompt"
            )
        if capacity:
            cache_lib.check_capacity(lengths, np.full_like(lengths, num_tokens - 1), capacity)
        slots = capacity or _round(-(-needed // self.chips)) * self.chips
        slots = min(slots, program.max_capacity(self.config, self.chips) or slots)
        slots = self._check_memory(len(prompts), slots)
        power_of_two = 1 << (longest - 2).bit_length()  # that longest - 1 tokens fit
        width = min(self.chunk, slots, max(NARROWEST, power_of_two))
        ends_V = np.zeros(self.config.vocab_size, bool)
        ends_V[stop_tokens] = True
        streams_B = np.array(_streams(prompts), np.uint32)

        def make() -> Generation:
            choice = Choice(sampling.parameters(), jax.random.key(seed), streams_B, ends_V)
            return Generation(self, prompts, choice, num_tokens, slots)

        compiling = 0.0
        if (len(prompts), slots, width) not in self._compiled:
            before = time.perf_counter()
            if on_compile is not None:
                on_compile()
            make().idle(width)
            self._compiled.add((len(prompts), slots, width))
            compiling = time.perf_counter() - before
        generation = make()
        generation.begin(width, begun=begun, compiling=compiling, on_chunk=on_prefill)
        return generation

    def _check_ids(
        self, prompts: Sequence[Sequence[int]], stop_tokens: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """Both as lists of integers."""
        V = self.config.vocab_size

        def ids(tokens, message) -> list[int]:
            numbers = []
            for i, token in enumerate(tokens):
                try:
                    numbers.append(operator.index(token))
                except TypeError:  # 1.7, or a character
                    numbers.append(-1)
                if not 0 <= numbers[-1] < V:
                    allowed = f"the vocabulary has {V} tokens, ids 0 to {V - 1}"
                    raise UserError(f"{message(i + 1, token)}; {allowed}")
            return numbers

        if not len(prompts):
            raise UserError("no prompts: give at least one")
        checked = []
        for b, prompt in enumerate(prompts, 1):
            if not len(prompt):
                raise UserError(f"prompt {b} has no tokens: start it with the tokenizer's BOS")
            checked.append(ids(prompt, lambda i, t, b=b: f"prompt {b}, token {i}: no id {t}"))
        return checked, ids(stop_tokens, lambda i, t: f"stop token {t}: no such id")

    def _cache(self, batch: int, capacity: int) -> Cache:
        """The cache as ShapeDtypeStructs, with shardings."""
        shape = dict(batch=batch, capacity=capacity, dtype=self.compute.dtype, chips=self.chips)
        cache = cache_lib.abstract(self.config.mechanisms, **shape)
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(place, cache, program.cache_shardings(cache, self.sharding))

    def _check_memory(self, batch: int, capacity: int) -> int:
        """The tokens that each sequence of such a cache has room for."""
        cache = self._cache(batch, capacity)
        need, there = cache_lib.live_bytes(cache) // self.chips, runtime.memory_per_device()
        device = jax.local_devices()[0]
        if device.platform != "cpu":  # there, what is free is what was counted
            there -= device.memory_stats()["bytes_in_use"]
        if need > there:
            each = f" on each of {self.chips} chips" if self.chips > 1 else ""
            raise UserError(
                f"a cache of {batch} sequences of {cache.capacity:,} tokens needs "
                f"{need / 1e9:,.1f} GB of {there / 1e9:,.1f} GB{each}: generate fewer tokens, "
                "lower capacity (0: what is needed), or give fewer prompts at once"
            )
        return cache.capacity


class Generation:
    """One batch under way: iterate for its tokens, once.

    Attributes:
      tokens: the ids generated so far, a list per sequence; a stop token is not among them.
      finished: [B] bool, whether a sequence has ended.
      cache: as of the last step dispatched.
      timing: what took how long.
    """

    def __init__(self, generator: Generator, prompts, choice: Choice, num_tokens: int, capacity):
        B = len(prompts)
        self._generator = generator
        self._choice = self._put(choice)
        self._ends_V = choice.ends_V
        self._num_tokens = num_tokens
        self._cancelled = np.zeros(B, bool)
        self._cancelled_B = self._put(self._cancelled)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.finished = np.zeros(B, bool)
        self._last = np.array([prompt[-1] for prompt in prompts], np.int32)
        self._prompts = prompts
        self.timing = Timing(prompt_tokens=sum(len(prompt) for prompt in prompts))
        self.cache = cache_lib.empty(generator._cache(B, capacity))

    def idle(self, width: int) -> None:
        """Runs both functions once with nothing to do, which compiles them."""
        B = len(self._prompts)
        self._prefill(np.zeros((B, width), np.int32), np.zeros(B, np.int32))
        self._step(self._put(self._last), self._put(np.ones(B, bool)))
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
        done_B = self._put(np.zeros(len(self._prompts), bool))
        self._first = self._step(self._put(self._last), done_B)

    def _put(self, tree):
        return jax.device_put(tree, self._generator.sharding)

    def _prefill(self, tokens_BT: np.ndarray, counts_B: np.ndarray) -> None:
        g = self._generator
        self.cache = g._prefill(g.weights, self.cache, *self._put((tokens_BT, counts_B)))

    def _step(self, token_B: jax.Array, done_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = self._generator
        state = token_B, done_B, self._cancelled_B
        self.cache, token_B, done_B = g._decode_step(g.weights, self.cache, *state, self._choice)
        return token_B, done_B

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yields once per step the new tokens as (sequence, id), until all sequences have ended."""
        token_B, done_B = self._first
        for n in range(self._num_tokens):
            following = self._step(token_B, done_B) if n + 1 < self._num_tokens else None
            ids = jax.device_get(token_B)
            new = []
            for b in np.flatnonzero(~self.finished).tolist():
                if self._ends_V[ids[b]]:
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

    def finish(self, b: int) -> None:
        """Ends sequence b: it grows no more, from the next step dispatched."""
        self.finished[b] = self._cancelled[b] = True
        self._cancelled_B = self._put(self._cancelled.copy())


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


def check_options(*, num_tokens: int, seed: int, capacity: int) -> None:
    """Raises a UserError for what `Generator.start` takes for no model."""
    at_least("num_tokens", num_tokens, 1)
    at_least("capacity", capacity, 0)
    at_least("seed", seed, 0)
    if seed >= 1 << 32:
        raise UserError(f"seed = {seed}: must be below 2**32")


def max_positions(config: TransformerConfig, chips: int = 1) -> int | None:
    """How many tokens a model has positions for, its cache on so many chips; None: any number."""
    learned = config.block.max_positions if config.block.positions == "learned" else None
    limits = (learned, program.max_capacity(config, chips))
    return min((limit for limit in limits if limit is not None), default=None)


def _everywhere(weights: dict) -> jax.sharding.Sharding:
    """The sharding that has a whole copy wherever there are weights."""
    sharding = jax.tree.leaves(weights)[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


def _for_devices(implementation: str | None, devices: set[jax.Device], chips: int) -> str | None:
    """The implementation for these devices; XLA does not divide a kernel between several.

    Args:
      chips: that the cache is split over; of those each runs a kernel of its own.
    """
    device, count = next(iter(devices)), len(devices)
    if chips > 1 and implementation not in (None, *sharded.IMPLEMENTATIONS):
        raise UserError(
            f"implementation = {implementation!r}: reads a whole cache, and this one is split over "
            f"{chips} chips: use one of {', '.join(sharded.IMPLEMENTATIONS)}, or leave it out"
        )
    if implementation is None:  # the default looks at the first device that JAX has
        elsewhere = api.kernels_of(device) != api.kernels_of(jax.devices()[0])
        return "xla" if count > chips or elsewhere else None
    if api.is_kernel(implementation):
        if count > chips or api.kernels_of(device) != implementation:
            raise UserError(
                f"implementation = {implementation!r}: runs on one {implementation.upper()}; the "
                f"model is on {count} x {device.device_kind}: use 'xla', or leave it out"
            )
    return implementation


def _round(tokens: int) -> int:
    """128 · 2^i: few sizes, so few compilations."""
    return LANES << (-(-tokens // LANES) - 1).bit_length()


def _streams(prompts: Sequence[Sequence[int]]) -> list[int]:
    """A random stream per sequence: by its prompt, and by how often that came before."""
    seen, streams = {}, []
    for prompt in prompts:
        content = np.asarray(prompt, np.int32).tobytes()
        seen[content] = seen.get(content, -1) + 1
        streams.append(zlib.crc32(content, seen[content]))
    return streams


def _chunks(prompts: Sequence[Sequence[int]], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """tokens_BT of `size` tokens, and counts_B of real ones, until all prompts are through."""
    for start in range(0, max(len(prompt) for prompt in prompts), size):
        tokens_BT = np.zeros((len(prompts), size), np.int32)
        counts_B = np.zeros(len(prompts), np.int32)
        for b, prompt in enumerate(prompts):
            part = prompt[start : start + size]
            tokens_BT[b, : len(part)], counts_B[b] = part, len(part)
        yield tokens_BT, counts_B
