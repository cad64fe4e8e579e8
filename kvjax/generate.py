"""Generates text with a trained model.

    python -m kvjax.generate --workdir=runs/lrkv_tiny --prompt='The king '

Text is streamed to standard output; with several prompts, one after the other and numbered. Figures
and warnings go to standard error.
"""

import argparse
from collections.abc import Sequence
import sys

import jax

from kvjax.cache import quantized
from kvjax.decoding import program, sampling as sampling_lib
from kvjax.decoding.generator import Generator, check_options
from kvjax.decoding.text import GeneratedTexts, check_stop, generate
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.command_line import say
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.text import check_text
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.workdir.trained import start_loading


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_run()
    sampling_lib.add_options(parser, temperature=0.8, top_k=0)
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="text to continue; may be repeated")
    add("--prompt_file", default="", help="one prompt per line; - is standard input")
    add("--num_tokens", type=int, default=100, help="tokens after each prompt (100)")
    add("--stop", action="append", default=[], help="text before which to end; may be repeated")
    text = "id at which to end; may be repeated"
    add("--stop_token", type=int, action="append", default=[], help=text)
    yes_no = argparse.BooleanOptionalAction
    add("--end_at_special", action=yes_no, default=True, help="end at special tokens (yes)")
    text = "tokens per sequence in the cache; 0: as needed (0)"
    add("--capacity", type=int, default=0, help=text)
    add("--chips", type=int, default=1, help="devices that the cache's tokens are sharded over (1)")
    kernels = ", ".join(IMPLEMENTATIONS)
    add("--implementation", default="", help=f"decode attention: {kernels} (by the device)")
    return parser


def read_prompts(prompts: Sequence[str], file: str) -> list[str]:
    """Returns the prompts of both options; raises a UserError for an empty prompt, or no prompt."""
    prompts = list(prompts)
    advice = "give text, as in --prompt='The king '"
    for prompt in prompts:
        if not prompt:
            raise UserError(f"--prompt='' is empty: {advice}")
        check_text("--prompt", prompt)
    if file:
        name = "standard input" if file == "-" else f"--prompt_file={file}"
        try:
            if file == "-":
                content = sys.stdin.buffer.read()
            else:
                content = runtime.path("--prompt_file", file).read_bytes()
            text = content.decode("utf-8-sig")
        except OSError as error:
            raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not UTF-8 text: {error}") from error
        lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        for i, line in enumerate(lines, 1):
            if not line.strip():
                raise UserError(f"{name}, line {i} is blank: one prompt per line is needed")
        prompts += lines
    if not prompts:
        raise UserError(f"no prompt: {advice}, or --prompt_file=FILE with one per line (-: stdin)")
    return prompts


def main(arguments: list[str]) -> None:
    """Generates; see the module's docstring."""
    values = _parser().parse(arguments)
    with command_line.naming_options(values):
        _run(values)


def _run(values: argparse.Namespace) -> None:
    runtime.start()
    command_line.require(values, workdir="the folder of a trained run, as runs/lrkv_tiny")
    prompts = read_prompts(values.prompt, values.prompt_file)
    sampling = sampling_lib.from_options(values)
    options = dict(num_tokens=values.num_tokens, seed=values.seed, capacity=values.capacity)
    check_options(**options)
    check_stop(values.stop)
    quantized.bits_of(values.cache_dtype)
    implementation = values.implementation or None
    if implementation is not None:
        one_of("implementation", implementation, tuple(IMPLEMENTATIONS))
    mesh = None
    if values.chips != 1:
        mesh = program.make_mesh(values.chips, jax.local_devices())
    with progress.waiting("reading the model"):
        loaded = start_loading(
            runtime.workdir(values.workdir),
            step=values.step,
            dtype=values.dtype,
            cache_dtype=values.cache_dtype,
            programs=mesh is None,
            implementation=implementation,
        )()
        generator = Generator(
            loaded.model,
            loaded.compute,
            implementation=implementation,
            mesh=mesh,
            stored=True,
        )
    tokenizer, context = loaded.tokenizer, loaded.context
    del loaded  # frees the weights that the generator has copied
    if written := sorted({s for prompt in prompts for s in tokenizer.written_out(prompt)}):
        names = ", ".join(written)
        say(f"special tokens in a prompt are read as the characters they are made of: {names}")
    longest = 1 + max(len(tokenizer.encode(prompt)) for prompt in prompts)
    with progress.waiting("reading the prompts") as status:
        output = _OrderedOutput(prompts, status)

        def on_compile() -> None:
            # Called after the generator's checks: a warning before an error would mislead.
            if longest + values.num_tokens - 1 > context:
                say(
                    f"a prompt of {longest} tokens and {values.num_tokens} to generate go past the "
                    f"{context} tokens the model was trained on: expect worse text there"
                )
            status.now(f"compiling for {len(prompts)} prompt(s)")

        result = _generate(
            generator,
            tokenizer,
            prompts,
            **options,
            sampling=sampling,
            stop=values.stop,
            stop_tokens=values.stop_token,
            end_at_special=values.end_at_special,
            on_text=output.add,
            on_end=output.end,
            on_compile=on_compile,
            on_prefill=lambda done, total: status.at(f"{done} of {total} parts read"),
        )
    sys.stdout.flush()
    say(result.summary())


def _generate(*args, **options) -> GeneratedTexts:
    """Calls `generate`; raises a UserError if memory runs out."""
    try:
        return generate(*args, **options)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"out of memory ({first_line(error)}): give fewer prompts at once, a smaller "
            "--num_tokens or a smaller --capacity"
        ) from error


class _OrderedOutput:
    """Prints texts in the order of the prompts, numbered if there are several.

    The first text that is not complete is streamed; later ones are buffered until it ends.
    """

    def __init__(self, prompts: Sequence[str], status: progress.waiting):
        self._unprinted = list(prompts)  # text of each sequence
        self._begun = [False] * len(prompts)
        self._ended = [False] * len(prompts)
        self._current = 0
        self._status = status

    def add(self, b: int, text: str) -> None:
        self._unprinted[b] += text
        if b == self._current:
            self._status.end()
            self._print(b)

    def end(self, b: int) -> None:
        self._ended[b] = True
        self._status.end()
        while self._current < len(self._ended) and self._ended[self._current]:
            self._print(self._current)
            print(flush=True)
            self._current += 1
        if self._current < len(self._ended):
            self._print(self._current)

    def _print(self, b: int) -> None:
        if not self._begun[b] and len(self._ended) > 1:
            print(f"--- {b + 1} ---")
        self._begun[b] = True
        print(self._unprinted[b], end="", flush=True)
        self._unprinted[b] = ""


if __name__ == "__main__":
    command_line.run(main)
