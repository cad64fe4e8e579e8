"""Chats with a trained model in the terminal.

    python -m kvjax.chat --workdir=runs/lrkv_128m_mid
    echo 'What is 2 + 3?' | python -m kvjax.chat --workdir=runs/lrkv_128m_mid --temperature=0

A mid-trained model calls a calculator, shown as [2+3=5]; an imported model uses its published chat
template. When the context is full, the oldest turns are left out. Ctrl-C ends an answer; without
one it ends the program, like Ctrl-D. Lines that start with / are commands: /help lists them.
"""

import argparse
from collections.abc import Iterator
import contextlib
import signal
import sys

from kvjax.cache import quantized
from kvjax.chat.history import History
from kvjax.conversation import calculator
from kvjax.conversation.dialogue import Dialogue
from kvjax.decoding import sampling as sampling_lib
from kvjax.decoding.answers import answers
from kvjax.decoding.generator import Generator, check_options
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.command_line import say
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.text import check_text, did_you_mean
from kvjax.workdir import dialogue as dialogue_lib, trained

_COMMANDS = {
    "/reset": "starts a new conversation",
    "/save FILE": "appends the conversation to a file, as a line of JSON that mid-training reads",
    "/help": "lists the commands",
    "/quit": "ends the program, like Ctrl-D",
}
# Displayed text of special tokens: a calculator call and its result appear as [2+3=5].
_SHOWN = {"python_start": "[", "python_end": "=", "output_start": "", "output_end": "]"}


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_run()
    sampling_lib.add_options(parser, temperature=0.6, top_k=50)
    add = parser.add_argument
    add("--system", default="", help="system message")
    text = "maximum tokens of an answer (256, or half of the context if that is less)"
    add("--num_tokens", type=int, help=text)
    add("--context", type=int, default=0, help="context in tokens; 0: as trained (0)")
    text = "format of the calculator's results: nanochat writes 8.0, dataset 8 (nanochat)"
    add("--calculator", default=calculator.MODES[0], help=text)
    return parser


def main(arguments: list[str]) -> None:
    """Chats until the input ends; see the module's docstring."""
    options = _parser().parse(arguments)
    with command_line.naming_options(options):
        _run(options)


def _run(options: argparse.Namespace) -> None:
    command_line.require(options, workdir="the folder of a trained run, as runs/lrkv_128m_mid")
    sampling = sampling_lib.from_options(options)
    num_tokens = 1 if options.num_tokens is None else options.num_tokens
    check_options(num_tokens=num_tokens, seed=options.seed, capacity=0)
    at_least("context", options.context, 0)
    one_of("calculator", options.calculator, calculator.MODES)
    quantized.bits_of(options.cache_dtype)
    check_text("system", options.system)
    runtime.start()
    workdir = runtime.workdir(options.workdir)
    dtypes = dict(dtype=options.dtype, cache_dtype=options.cache_dtype)
    load = trained.start_loading(workdir, step=options.step, **dtypes, programs=True)
    saved = trained.find(workdir, step=options.step)
    dialogue = dialogue_lib.of(saved, limit=sys.maxsize)  # no cut: `History` leaves out whole turns
    with progress.waiting("reading the model"):
        loaded = load(saved)
        generator = Generator(loaded.model, loaded.compute, stored=True)
        del loaded  # frees the weights that the generator has copied
    context = _context(options, saved, generator)
    history = History(dialogue, context - options.num_tokens, options.system)
    session = ChatSession(generator, dialogue, history, options, sampling, context)
    for line in lines():
        session.handle_line(line)


def _context(options: argparse.Namespace, saved: trained.SavedModel, generator: Generator) -> int:
    """Returns the context in tokens: --context, or the trained one up to the model's positions.

    Sets `options.num_tokens` if it is not given.
    """
    context = options.context or saved.context
    if generator.positions is not None and context > generator.positions:
        if options.context:
            raise UserError(
                f"--context={context}: the model's positions end after {generator.positions} tokens"
            )
        context = generator.positions
    if context > saved.context:
        warn(
            f"--context={context}: the model was trained on {saved.context:,} tokens at a time: "
            "expect worse answers beyond"
        )
    if options.num_tokens is None:
        options.num_tokens = min(256, context // 2)
    if options.num_tokens >= context:
        raise UserError(
            f"--num_tokens={options.num_tokens}: leaves no room for a message in a context of "
            f"{context} tokens: give fewer, or a larger --context"
        )
    return context


def lines() -> Iterator[str]:
    """Yields the lines of the terminal or of standard input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing in input())
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            print(flush=True)
            return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text: {error}") from error


class ChatSession:
    """A conversation with a model: handles lines of input and prints the answers."""

    def __init__(
        self,
        generator: Generator,
        dialogue: Dialogue,
        history: History,
        options: argparse.Namespace,
        sampling: Sampling,
        context: int,
    ):
        self._generator, self._dialogue, self.history = generator, dialogue, history
        self._options, self._sampling, self._context = options, sampling, context
        names = dialogue.specials._asdict() if dialogue.specials else {}
        self._shown = {names[key]: text for key, text in _SHOWN.items() if key in names}
        self._num_messages = 0

    def handle_line(self, line: str) -> None:
        """Answers a message or runs a command; prints user errors and goes on."""
        try:
            if line.startswith("/"):
                self._run_command(line)
            elif line.strip():
                self._answer(line)
        except UserError as error:
            say(str(error))

    def _run_command(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        if name == "/reset":
            self.history.reset()
            say("a new conversation")
        elif name == "/save":
            if not argument.strip():
                raise UserError("/save FILE: which file?")
            path = runtime.path("/save", argument.strip())
            self.history.save(path)
            say(f"added to {path}")
        elif name == "/help":
            print("\n".join(f"{name:<12}{text}" for name, text in _COMMANDS.items()), flush=True)
        elif name == "/quit":
            raise SystemExit(0)
        else:
            hint = did_you_mean(name, _COMMANDS)
            raise UserError(f"{name}: there is no such command{hint}; /help lists them")

    def _answer(self, text: str) -> None:
        check_text("your message", text)
        ids, left_out = self.history.add_question(text)
        if left_out:
            say(f"the context is full: the first {left_out} turn(s) are left out")
        options = self._options
        self._num_messages += 1
        try:
            with progress.waiting("reading the conversation") as status:
                printer = _AnswerPrinter(self._shown, status)
                with _ended_by_interrupt(printer):
                    answers(
                        self._generator,
                        self._dialogue,
                        [ids],
                        num_tokens=options.num_tokens,
                        sampling=self._sampling,
                        seed=(options.seed + self._num_messages - 1) % (1 << 32),
                        mode=options.calculator,
                        capacity=self._context,
                        on_token=printer.token,
                    )
        except _EndedError:
            pass
        except BaseException:
            self.history.turns.pop()  # keeps no message without an answer
            raise
        print(flush=True)
        if printer.ids:
            self.history.add_answer(printer.ids)
        else:
            self.history.turns.pop()


class _EndedError(Exception):
    """Ctrl-C during an answer."""


class _AnswerPrinter:
    """Prints an answer token by token.

    Args:
      shown: displayed text by special token.
      status: progress display, ended by the first token.
    """

    def __init__(self, shown: dict[int, str], status: progress.waiting):
        self._shown, self._status = shown, status
        self.ids, self.is_ended = [], False

    def token(self, b: int, token: int, text: str) -> None:
        self._status.end()
        if self.is_ended:
            raise _EndedError
        if token >= 0:
            self.ids.append(token)
        print(self._shown.get(token, text), end="", flush=True)


@contextlib.contextmanager
def _ended_by_interrupt(printer: _AnswerPrinter) -> Iterator[None]:
    """Makes Ctrl-C end the answer at its next token, so that no decode step is interrupted."""

    def end(number, frame):
        printer.is_ended = True

    previous_handler = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


if __name__ == "__main__":
    command_line.run(main)
