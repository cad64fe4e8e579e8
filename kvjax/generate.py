"""Text from a trained run.

    python -m kvjax.generate --workdir=runs/lrkv_tiny --prompt='The king '

Text goes to standard output, figures and warnings to standard error. The text of a single prompt
appears as it comes; those of several appear, numbered, when all are done.
"""

from collections.abc import Sequence
import os
import sys

from absl import app
from absl import flags
from etils import epath
import jax

from kvjax import decode_program
from kvjax import decoding
from kvjax import runtime
from kvjax.configuration import one_of
from kvjax.decoding import Generator
from kvjax.errors import UserError
from kvjax.errors import first_line
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.sampling import Sampling
from kvjax.text_generation import check_stop
from kvjax.text_generation import generate
from kvjax.trained import load

FLAGS = {
    "workdir": (flags.DEFINE_string, "", "A run's folder, local or gs://."),
    "prompt": (flags.DEFINE_multi_string, [], "Text to go on from; may be repeated."),
    "prompt_file": (flags.DEFINE_string, "", "One prompt per line; - is standard input."),
    "num_tokens": (flags.DEFINE_integer, 100, "Tokens to generate after each prompt."),
    "temperature": (flags.DEFINE_float, 0.8, "0: always the most likely token."),
    "top_k": (flags.DEFINE_integer, 0, "Only the k most likely tokens; 0: all."),
    "top_p": (flags.DEFINE_float, 1.0, "Of those, the fewest that reach this share; 1: all."),
    "seed": (flags.DEFINE_integer, 0, "The same seed gives a prompt the same text."),
    "stop": (flags.DEFINE_multi_string, [], "Text to end before, if it comes; may be repeated."),
    "stop_token": (flags.DEFINE_multi_integer, [], "Token id to end at; may be repeated."),
    "end_at_special": (flags.DEFINE_bool, True, "End at the tokenizer's special tokens."),
    "capacity": (flags.DEFINE_integer, 0, "Tokens per sequence in the cache; 0: as needed."),
    "step": (flags.DEFINE_integer, None, "Of the checkpoint; default: the latest."),
    "dtype": (flags.DEFINE_string, "", "To compute in; default: the run's."),
    "chips": (flags.DEFINE_integer, 1, "Devices that the tokens of the cache are split over."),
    "implementation": (
        flags.DEFINE_string,
        "",
        f"Of decode attention: {', '.join(IMPLEMENTATIONS)}; default: its kernels or xla.",
    ),
}


def define_flags(values: flags.FlagValues) -> None:
    """Adds the options; not on import, since `kvjax.main` has options of the same names."""
    for name, (define, default, text) in FLAGS.items():
        define(name, default, text, flag_values=values)


def read_prompts(prompts: Sequence[str], file: str) -> list[str]:
    """The prompts of both options; a UserError where one is empty or there is none."""
    prompts = list(prompts)
    ask = "give text, as in --prompt='The king '"
    for prompt in prompts:
        if not prompt:
            raise UserError(f"--prompt='' is empty: {ask}")
    if file:
        name = "standard input" if file == "-" else f"--prompt_file={file}"
        try:
            content = sys.stdin.buffer.read() if file == "-" else epath.Path(file).read_bytes()
        except OSError as error:
            raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not UTF-8 text: {error}") from error
        lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        for i, line in enumerate(lines):
            if not line.strip():
                raise UserError(f"{name}, line {i + 1} is blank: one prompt per line is needed")
        prompts += lines
    if not prompts:
        raise UserError(f"no prompt: {ask}, or --prompt_file=FILE with one per line (-: stdin)")
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"--prompt={prompt!r} is not UTF-8 text: {error}") from error
    return prompts


def command(values: flags.FlagValues) -> None:
    """Prints text for the options given; figures and warnings go to standard error."""
    if not values.workdir:
        raise UserError("--workdir is missing: the folder of a trained run, as runs/lrkv_tiny")
    prompts = read_prompts(values.prompt, values.prompt_file)
    sampling = Sampling(temperature=values.temperature, top_k=values.top_k, top_p=values.top_p)
    options = dict(
        num_tokens=values.num_tokens,
        seed=values.seed,
        capacity=values.capacity,
    )
    decoding.check_options(**options)
    check_stop(values.stop)
    implementation = values.implementation or None
    if implementation is not None:
        one_of("implementation", implementation, tuple(IMPLEMENTATIONS))
    mesh = None
    if values.chips != 1:
        mesh = decode_program.make_mesh(values.chips, jax.local_devices())
    loaded = load(epath.Path(values.workdir), step=values.step, dtype=values.dtype)
    devices = dict(implementation=implementation, mesh=mesh)
    generator = Generator(loaded.model, loaded.compute, **devices)
    tokenizer, context = loaded.tokenizer, loaded.context
    del loaded  # the generator has the weights: once is enough
    longest = 1 + max(len(tokenizer.encode(prompt)) for prompt in prompts)
    if longest + values.num_tokens - 1 > context:
        say(
            f"a prompt of {longest} tokens and {values.num_tokens} to generate go past the "
            f"{context} tokens the model was trained on: expect worse text there"
        )
    begun = False

    def show(b: int, text: str) -> None:
        nonlocal begun
        print(text if begun else prompts[b] + text, end="", flush=True)
        begun = True

    one = len(prompts) == 1
    result = generate(
        generator,
        tokenizer,
        prompts,
        **options,
        sampling=sampling,
        stop=values.stop,
        stop_tokens=values.stop_token,
        end_at_special=values.end_at_special,
        on_text=show if one else None,
    )
    if one:
        print()
    else:
        for i, (prompt, text) in enumerate(zip(prompts, result.texts, strict=True)):
            print(f"--- {i + 1} ---\n{prompt}{text}")
    sys.stdout.flush()
    say(result.summary())


def say(message: str) -> None:
    print(f"kvjax: {message}", file=sys.stderr, flush=True)


def parse(argv: list[str], values: flags.FlagValues) -> list[str]:
    """The arguments that are no options; a wrong option ends the process as `main` does."""
    try:
        return values(argv)
    except flags.Error as error:
        say(str(error))
        sys.exit(2)


def main(argv: list[str], values: flags.FlagValues) -> None:
    """Runs the command line; what the user must change ends it with one message and status 2."""
    try:
        if len(argv) > 1:
            raise UserError(f"unknown argument {argv[1]!r}: options start with --")
        runtime.start()
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no error
        command(values)
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, NotImplementedError, OSError) as error:
        say(str(error))
        sys.exit(2)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(
            f"out of memory ({first_line(error)}): give fewer prompts at once, a smaller "
            "--num_tokens or a smaller --capacity"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(
        lambda argv: main(argv, flags.FLAGS), flags_parser=lambda argv: parse(argv, flags.FLAGS)
    )
