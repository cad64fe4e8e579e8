"""An assistant's answers to prompts; calculator calls in an answer are executed."""

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
    """An assistant's answer.

    Attributes:
      ids: token ids, including the calculator's, without the stop token.
      text: decoded ids, with special tokens by name, up to the first stop string.
      calls: (expression, result) of each calculator call; None if it has no result.
      is_ended: False if the answer was cut off at num_tokens.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    calls: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)
    is_ended: bool = False


class CalculatorCalls:
    """Executes the calculator calls in one sequence of tokens (nanochat, commit 0f00788).

    Args:
      mode: see `calculator.result`.
    """

    def __init__(self, tokenizer: Tokenizer, specials: Specials, mode: str):
        self._tokenizer, self._specials, self._mode = tokenizer, specials, mode
        self._expression: list[int] | None = None  # tokens of an open call
        self.calls: list[tuple[str, str | None]] = []

    def push(self, token: int) -> list[int]:
        """Reads a token; returns the tokens to force after it if it completes a call."""
        s = self._specials
        if token == s.python_start:
            self._expression = []
        elif token == s.python_end and self._expression is not None:
            tokens, self._expression = self._expression, None
            if not tokens:
                return []
            expression = self._tokenizer.decode(tokens)
            result = calculator.result(expression, self._mode)
            self.calls.append((expression, result))
            if result is not None:
                return [s.output_start, *self._tokenizer.encode(result), s.output_end]
        elif self._expression is not None:
            self._expression.append(token)
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
    is_continued: bool | None = None,
) -> list[Answer]:
    """Answers each prompt.

    Args:
      prompts: token ids, see `Dialogue.prompt`.
      num_tokens: largest number of tokens of an answer, including the calculator's.
      mode: mode of the calculator, see `calculator.result`.
      stop: stop strings; an answer's text ends before the first of them.
      capacity: see `Generator.start`.
      on_token: called with a sequence's index, each of its tokens, and the text that it makes
        final; at the end with token -1 and the remaining text.
      on_compile: see `Generator.start`.
      timing: called once with the batch's timing.
      is_continued: True if an answer's text continues the prompt's; None: without a chat format.

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
    calculators = [
        CalculatorCalls(tokenizer, specials, mode) if specials else None for _ in prompts
    ]
    if is_continued is None:
        is_continued = dialogue.name == ""
    streams = [TextStream(tokenizer, stop, is_continued=is_continued) for _ in prompts]
    for new in generation:
        for b, token in new:
            text = streams[b].push(token)
            if on_token is not None:
                on_token(b, token, text)
            if streams[b].stopped:
                generation.finish(b)
            elif calculators[b] is not None:
                generation.force(b, calculators[b].push(token))
    results = []
    for b, stream in enumerate(streams):
        rest = stream.close()
        if on_token is not None and rest:
            on_token(b, -1, rest)
        ids = generation.tokens[b]
        is_ended = stream.stopped or len(ids) < num_tokens
        calls = calculators[b].calls if calculators[b] else []
        results.append(Answer(ids, stream.text, calls, is_ended))
    if timing is not None:
        timing(generation.timing)
    return results
