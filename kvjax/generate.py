"""Text from a trained run.

    python -m kvjax.generate --workdir=runs/lrkv_tiny --prompt='The king '

Text goes to standard output, figures and warnings to standard error.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import json
import os
import sys

from absl import app
from absl import flags
from etils import epath
from flax import nnx
import jax
import ml_collections
import numpy as np

from kvjax import cache as cache_lib
from kvjax import checkpoint
from kvjax import experiment as experiment_lib
from kvjax import runtime
from kvjax.configuration import one_of
from kvjax.data import prepare
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.data.text_stream import TextStream
from kvjax.data.tokenizer import Tokenizer
from kvjax.decoding import Generator
from kvjax.decoding import Timing
from kvjax.errors import UserError
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer
from kvjax.sampling import Sampling

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
    "implementation": (
        flags.DEFINE_string,
        "",
        f"Of decode attention: {', '.join(IMPLEMENTATIONS)}; default: chosen for the device.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate` made.

    Attributes:
      texts: per prompt, what follows it.
      tokens: per prompt, the ids; where a stop string ended the text, up to the one that held it.
    """

    texts: list[str]
    tokens: list[list[int]]
    timing: Timing
    capacity: int
    cache_bytes: int  # of the live arrays

    def summary(self) -> str:
        """One line of figures."""
        rate = self.timing.decode_tokens_per_second
        per_token = self.cache_bytes / (len(self.texts) * self.capacity)
        return (
            f"first token after {1e3 * self.timing.first:,.1f} ms"
            + (f", then {rate:,.0f} tokens/s" if rate else "")
            + f" (without the {self.timing.compiling:.1f} s of compiling before); "
            f"cache {self.cache_bytes:,} bytes = {len(self.texts)} x {self.capacity:,} tokens "
            f"x {per_token:,.0f}"
        )


def generate(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    end_at_special: bool = True,
    capacity: int = 0,
    on_text: Callable[[int, str], None] | None = None,
) -> Result:
    """Text after each prompt, which BOS is put in front of.

    Args:
      stop: strings before which a text ends; one that never comes changes nothing.
      end_at_special: whether BOS and the tokenizer's other specials end a sequence.
      on_text: called with the sequence and each piece of its text as soon as it is certain.

    Raises:
      UserError: an empty stop string; see `Generator.start` for the rest.
    """
    if any(not s for s in stop):
        raise UserError("a stop string is empty: leave it out, or give the text to stop before")
    if end_at_special:
        stop_tokens = [*stop_tokens, *np.flatnonzero(tokenizer.token_bytes() == 0).tolist()]
    generation = generator.start(
        [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts],
        num_tokens=num_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        capacity=capacity,
    )
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    give = on_text or (lambda b, text: None)
    for new in generation:
        for b, token in new:
            give(b, streams[b].push(token))
            if streams[b].stopped:
                generation.finish(b)
    for b, stream in enumerate(streams):
        give(b, stream.close())
    return Result(
        [stream.text for stream in streams],
        generation.tokens,
        generation.timing,
        generation.cache.capacity,
        cache_lib.live_bytes(generation.cache),
    )


# -- a run's workdir -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model from a workdir."""

    model: Transformer
    compute: Compute
    tokenizer: Tokenizer
    context: int  # tokens of a training row
    step: int


def load(workdir: epath.Path, *, step: int | None = None, dtype: str = "") -> Loaded:
    """The model of a workdir's checkpoint, on one device, in the dtype it computes in.

    Args:
      step: of the checkpoint; None: the latest.
      dtype: instead of the run's config.compute.dtype.

    Raises:
      UserError: not a workdir, no (such) checkpoint, one that cannot be read or of another model.
    """
    workdir = runtime.absolute(workdir)
    experiment = _experiment(workdir)
    if dtype:
        one_of("dtype", dtype, experiment_lib.DTYPES)
        compute = dataclasses.replace(experiment.compute, dtype=dtype)
        experiment = dataclasses.replace(experiment, compute=compute)
    steps = checkpoint.saved_steps(workdir / checkpoint.CHECKPOINTS)
    if not steps:
        raise UserError(f"{workdir} has no checkpoint yet: train on, or give another --workdir")
    if step is not None and step not in steps:
        raise UserError(f"step = {step}: {workdir} has no such checkpoint; it has {steps}")
    step = steps[-1] if step is None else step
    config = experiment.model
    platform = jax.devices()[0].platform
    compute = experiment.compute.resolve(platform, config.block.num_layers)
    tokenizer = _tokenizer(workdir, config.vocab_size)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = checkpoint.read_parameters(
        workdir / checkpoint.CHECKPOINTS,
        step,
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, compute.dtype, sharding=sharding),
            nnx.to_pure_dict(abstract),
        ),
    )
    model = nnx.merge(graph, params)
    return Loaded(model, compute, tokenizer, experiment.data.sequence_length, step)


def _experiment(workdir: epath.Path) -> experiment_lib.Experiment:
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(
            f"{workdir} is no workdir of a run ({path.name} is missing): give --workdir=runs/NAME, "
            "the folder that `python -m kvjax.main` trained in"
        )
    try:
        tree = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): restore it, or train again") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} describes no run: restore it, or train again")
    try:  # the mesh is no part of what was trained
        return experiment_lib.resolve(ml_collections.ConfigDict(tree | {"mesh": {}}))
    except (UserError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error


def _tokenizer(workdir: epath.Path, vocab_size: int) -> Tokenizer:
    path = workdir / prepare.TOKENIZER
    if not path.exists():
        raise UserError(
            f"{path} is missing: run the command that trained {workdir} again, which writes the "
            "file (and of a complete run changes nothing else)"
        )
    tokenizer = tokenizer_lib.load(path)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"{path} has {tokenizer.vocab_size} tokens, the model {vocab_size}: restore the file "
            "that belongs to the run"
        )
    return tokenizer


# -- the command line ------------------------------------------------------------------------------


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
    loaded = load(epath.Path(values.workdir), step=values.step, dtype=values.dtype)
    generator = Generator(
        loaded.model, loaded.compute, implementation=values.implementation or None
    )
    longest = 1 + max(len(loaded.tokenizer.encode(prompt)) for prompt in prompts)
    options = dict(
        num_tokens=values.num_tokens,
        sampling=sampling,
        seed=values.seed,
        stop=values.stop,
        stop_tokens=values.stop_token,
        end_at_special=values.end_at_special,
        capacity=values.capacity,
    )
    if longest + values.num_tokens - 1 > loaded.context:
        say(
            f"a prompt of {longest} tokens and {values.num_tokens} to generate go past the "
            f"{loaded.context} tokens the model was trained on: expect worse text there"
        )
    begun = False

    def show(b: int, text: str) -> None:
        nonlocal begun
        print(text if begun else prompts[b] + text, end="", flush=True)
        begun = True

    one = len(prompts) == 1
    result = generate(
        generator, loaded.tokenizer, prompts, **options, on_text=show if one else None
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
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(
        lambda argv: main(argv, flags.FLAGS), flags_parser=lambda argv: parse(argv, flags.FLAGS)
    )
