"""What an assistant says to prompts, with its calls of the calculator answered on the way."""

from collections.abc import Callable, Sequence
import dataclasses

from kvjax.conversation import calculator
from kvjax.conversation.dialogue import Dialogue
from kvjax.conversation.specials import Specials
from kvjax.data.tokenizer import Tokenizer
from kvjax.decoding.generation import Timing
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.decoding.text import check_stop
from kvjax.decoding.text_stream import TextStream
from kvjax.foundation.configuration import one_of

GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass
class Answer:
    """One answer.

    Attributes:
      ids: its tokens, what the calculator said included, the end left out.
      text: of them, specials by name, up to a stop string.
      calls: what the calculator was asked, and what it said; None: nothing.
      is_ended: whether it ended by itself.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    calls: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)
    is_ended: bool = False


class CalculatorCalls:
    """Listens to one sequence for calls of the calculator (nanochat, commit 0f00788).

    Args:
      mode: see `calculator.result`.
    """

    def __init__(self, tokenizer: Tokenizer, specials: Specials, mode: str):
        self._tokenizer, self._specials, self._mode = tokenizer, specials, mode
        self._asked: list[int] | None = None  # within a call
        self.calls: list[tuple[str, str | None]] = []

    def push(self, token: int) -> list[int]:
        """One more token; what the sequence must go on with, if a call has ended."""
        s = self._specials
        if token == s.python_start:
            self._asked = []
        elif token == s.python_end and self._asked is not None:
            asked, self._asked = self._asked, None
            if not asked:
                return []
            expression = self._tokenizer.decode(asked)
            result = calculator.result(expression, self._mode)
            self.calls.append((expression, result))
            if result is not None:
                return [s.output_start, *self._tokenizer.encode(result), s.output_end]
        elif self._asked is not None:
            self._asked.append(token)
        return []


def answers(
    generator: Generator,
    dialogue: Dialogue,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    mode: str = "nanochat",
    stop: Sequence[str] = (),
    capacity: int = 0,
    on_token: Callable[[int, int, str], None] | None = None,
    on_compile: Callable[[], None] | None = None,
    timing: Callable[[Timing], None] | None = None,
) -> list[Answer]:
    """An answer to each prompt.

    Args:
      prompts: token ids, see `Dialogue.prompt`.
      num_tokens: of an answer, at most; what the calculator says counts.
      mode: the calculator's, see `calculator.result`.
      stop: strings before which an answer's text ends.
      capacity: of the cache, see `Generator.start`.
      on_token: called with the sequence, each of its tokens, and the text that it makes certain.
      on_compile: called before anything is compiled, if anything has to be.
      timing: called with what took how long.

    Raises:
      UserError: an unknown mode, an empty stop string; see `Generator.start` for the rest.
    """
    one_of("calculator", mode, calculator.MODES)
    check_stop(stop)
    tokenizer, specials = dialogue.tokenizer, dialogue.specials
    generation = generator.start(
        prompts,
        num_tokens=num_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=dialogue.ends,
        capacity=capacity,
        on_compile=on_compile,
    )
    callers = [CalculatorCalls(tokenizer, specials, mode) if specials else None for _ in prompts]
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    for new in generation:
        for b, token in new:
            text = streams[b].push(token)
            if on_token is not None:
                on_token(b, token, text)
            if streams[b].stopped:
                generation.finish(b)
            elif callers[b] is not None:
                generation.force(b, callers[b].push(token))
    found = []
    for b, stream in enumerate(streams):
        rest = stream.close()
        if on_token is not None and rest:
            on_token(b, -1, rest)
        ids = generation.tokens[b]
        is_ended = stream.stopped or len(ids) < num_tokens
        calls = callers[b].calls if callers[b] else []
        found.append(Answer(ids, stream.text, calls, is_ended))
    if timing is not None:
        timing(generation.timing)
    return found
