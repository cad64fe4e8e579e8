"""Generates text after each of a batch of prompts."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses

import numpy as np

from kvjax import cache as cache_lib
from kvjax.data.tokenizer import Tokenizer
from kvjax.decoding.generation import Generation, Timing
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.decoding.text_stream import TextStream
from kvjax.foundation.errors import UserError


@dataclasses.dataclass(frozen=True)
class GeneratedTexts:
    """Texts of `generate`, with timing and cache size.

    Attributes:
      texts: the continuation of each prompt.
      tokens: token ids of each continuation, including the token that completes a stop string.
      capacity: of the cache, in tokens per sequence.
      cache_bytes: bytes of the cache's arrays, summed over chips.
      cache_dtype: the compute dtype, or "int8" or "int4" of a quantised cache.
      chips: number of chips that the cache is sharded over.
    """

    texts: list[str]
    tokens: list[list[int]]
    timing: Timing
    capacity: int
    cache_bytes: int
    cache_dtype: str
    chips: int = 1

    def summary(self) -> str:
        """Returns one line with latency, throughput and cache size."""
        rate = self.timing.decode_tokens_per_second
        per_token = self.cache_bytes / (len(self.texts) * self.capacity)
        compiling = self.timing.compiling
        return (
            f"first token after {1e3 * self.timing.first:,.1f} ms"
            + (f", then {rate:,.0f} tokens/s" if rate else "")
            + (f" (without the {compiling:.1f} s of compiling before)" if compiling else "")
            + f"; cache {self.cache_bytes:,} bytes = {len(self.texts)} x {self.capacity:,} tokens "
            f"x {per_token:,.0f} in {self.cache_dtype}"
            + (f", {self.cache_bytes // self.chips:,} on each chip" if self.chips > 1 else "")
        )


class TextGeneration:
    """A batch of texts in progress.

    Attributes:
      generation: its tokens, cache and timing.
      streams: text of each sequence so far.
    """

    def __init__(self, generation: Generation, streams: list[TextStream]):
        self.generation, self.streams = generation, streams

    def pieces(self) -> Iterator[tuple[int, str, bool]]:
        """Yields (sequence, piece of text, True if it is the last piece) once the text is final."""
        ended = np.zeros(len(self.streams), bool)
        for new in self.generation:
            for b, token in new:
                yield b, self.streams[b].push(token), False
                if self.streams[b].stopped:
                    self.generation.finish(b)
            for b in np.flatnonzero(self.generation.finished & ~ended).tolist():
                yield b, self.streams[b].close(), True
            ended |= self.generation.finished


def start(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    num_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    end_at_special: bool = True,
    capacity: int = 0,
    on_compile: Callable[[], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> TextGeneration:
    """Starts generating text after each prompt.

    Args:
      prompts: texts, to which BOS is prepended, or token ids, which are used as they are.
      stop: stop strings; a text ends before the first of them.
      end_at_special: whether BOS, other special tokens and the tokenizer's `ends` end a text.
      on_compile, on_prefill: see `Generator.start`.

    Raises:
      UserError: an empty stop string; a string instead of a list; see also `Generator.start`.
    """
    for name, value in {"prompts": prompts, "stop": stop}.items():
        if isinstance(value, str):  # would be read as a list of characters
            raise UserError(f"{name} = {value!r} is one string: give a list of strings")
    check_stop(stop)
    if end_at_special:
        special = np.flatnonzero(tokenizer.token_bytes() == 0).tolist()
        # Published models have rows of the vocabulary that no token uses.
        unused = range(tokenizer.vocab_size, generator.config.vocab_size)
        stop_tokens = [*stop_tokens, *special, *unused, *tokenizer.ends]
    ids = [
        [tokenizer.bos_id, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    generation = generator.start(
        ids,
        num_tokens=num_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        capacity=capacity,
        on_compile=on_compile,
        on_prefill=on_prefill,
    )
    without_text = {i for i in map(tokenizer.special, tokenizer.controls) if i is not None}
    # A text begins behind a control token; elsewhere it may open with a blank.
    streams = [
        TextStream(tokenizer, stop, is_continued=bool(len(p)) and int(p[-1]) not in without_text)
        for p in ids
    ]
    return TextGeneration(generation, streams)


def generate(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    on_text: Callable[[int, str], None] | None = None,
    on_end: Callable[[int], None] | None = None,
    **options,
) -> GeneratedTexts:
    """Generates text after each prompt.

    Args:
      on_text: called with a sequence's index and each piece of its text as soon as it is final.
      on_end: called with the index of a sequence whose text is complete.
      options: see `start`.
    """
    texts = start(generator, tokenizer, prompts, **options)
    for b, piece, is_end in texts.pieces():
        if on_text is not None:
            on_text(b, piece)
        if is_end and on_end is not None:
            on_end(b)
    generation = texts.generation
    return GeneratedTexts(
        [stream.text for stream in texts.streams],
        generation.tokens,
        generation.timing,
        generation.cache.capacity,
        cache_lib.live_bytes(generation.cache),
        generator.compute.cache_dtype,
        generator.chips,
    )


def check_stop(stop: Sequence[str]) -> None:
    """Raises a UserError if a stop string is empty."""
    if any(not s for s in stop):
        raise UserError("a stop string is empty: leave it out, or give the text to stop before")
