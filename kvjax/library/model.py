"""A trained or published model in memory, with its tokenizer.

model = kvjax.load("runs/smollm2")
print(*model.generate(["The capital of France is", "2 + 2 ="], num_tokens=20))
for piece in model.stream("Once upon a time"):
    print(piece, end="")
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import io
import json
import os
import pathlib
import types
from typing import TYPE_CHECKING

from flax import nnx
import jax.numpy as jnp
import numpy as np

from kvjax import cache as cache_lib
from kvjax.cache import quantized
from kvjax.costs import formulas
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.data.tokenizer import Tokenizer
from kvjax.decoding import text
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import runtime
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer
from kvjax.published import hub
from kvjax.workdir import origin, trained
from kvjax.workdir.trackers import DEFAULT, Tracker

if TYPE_CHECKING:
    import ml_collections


class Model:
    """A model that generates from its small KV cache.

    Attributes:
      name: of the run or the published model.
      config: the Transformer's sizes, with one mechanism per layer in `config.mechanisms`.
      tokenizer: `encode(text)` and `decode(ids)`.
      context: longest rows that the model was trained on, in tokens.
    """

    def __init__(
        self,
        name: str,
        transformer: Transformer,
        compute: Compute,
        tokenizer: Tokenizer,
        context: int,
    ):
        self.name, self.tokenizer, self.context = name, tokenizer, context
        self.config: TransformerConfig = transformer.config
        self._generator = Generator(transformer, compute, stored=True)
        self._logits = self._generator.engine.compiled(_logits)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        num_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """Returns the text after each prompt; all prompts run as one batch.

        Args:
          prompts: texts of any lengths; one text is a list of one.
          num_tokens: tokens after each prompt, at most.
          temperature: 0 is greedy.
          top_k: sample among the k most likely tokens; 0: all.
          top_p: of these, sample among the fewest with this total probability; 1: all.
          seed: the same seed gives a prompt the same text.
          stop: strings before which a text ends.
        """
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        result = text.generate(
            self._generator,
            self.tokenizer,
            batch,
            num_tokens=num_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            seed=seed,
            stop=stop,
        )
        return result.texts

    def stream(
        self,
        prompt: str,
        *,
        num_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yields the pieces of `generate`'s text as soon as they are final."""
        started = text.start(
            self._generator,
            self.tokenizer,
            [prompt],
            num_tokens=num_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            seed=seed,
            stop=stop,
        )
        for _, piece, _ in started.pieces():
            if piece:
                yield piece

    def logits(self, tokens: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Returns the logits after every token, computed from the cache: [T, V] or [B, T, V].

        Args:
          tokens: ids [T] or [B, T]; start with `tokenizer.bos_id`.
        """
        tokens_BT = np.asarray(tokens, np.int32)
        one_sequence = tokens_BT.ndim == 1
        tokens_BT = tokens_BT[None] if one_sequence else tokens_BT
        B, T = tokens_BT.shape
        V, limit = self.config.vocab_size, self._generator.positions
        if limit is not None and T > limit:
            raise UserError(f"tokens: {T:,} of them, more than the model's {limit:,} positions")
        if tokens_BT.size and not 0 <= tokens_BT.min() <= tokens_BT.max() < V:
            raise UserError(f"tokens: the vocabulary has {V} tokens, ids 0 to {V - 1}")
        engine = self._generator.engine
        cache = cache_lib.empty(engine.cache(B, self._generator.cache_capacity(B, T)))
        counts_B = np.full(B, T, np.int32)
        _, z_BTV = self._logits(engine.weights, cache, *engine.put((tokens_BT, counts_B)))
        return np.asarray(z_BTV[0] if one_sequence else z_BTV)

    def cache_bytes(self, tokens: int = 1, batch: int = 1) -> int:
        """Returns the bytes that the model's cache has for `batch` sequences of `tokens`."""
        bits = self._generator.compute.cache_bits
        return batch * tokens * formulas.cache_bytes_per_token(self.config, self.dtype, bits)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights, activations, and of a cache that is not quantised."""
        return jnp.dtype(self._generator.compute.dtype)


def load(
    source: str | os.PathLike, *, step: int | None = None, dtype: str = "", cache_dtype: str = ""
) -> Model:
    """Loads the model of a run, an export, or a published model.

    Args:
      source: a workdir, a Hugging Face folder (config.json, safetensors, tokenizer.json), a GGUF
        file, or hf://OWNER/NAME[@REVISION], which is downloaded into Hugging Face's cache.
      step: checkpoint of a workdir; None: the latest.
      dtype: "bfloat16" or "float32"; "": the run's, and float32 for published models.
      cache_dtype: "int8" or "int4": the cache is quantised; "": it is in `dtype`.

    Raises:
      UserError: no model is there, or it cannot be read, or cannot have this cache_dtype.
    """
    if dtype:
        one_of("dtype", dtype, ("bfloat16", "float32"))
    bits = quantized.bits_of(cache_dtype)
    if hub.is_name(source):
        source = hub.model("source", os.fspath(source))
    path = runtime.path("source", os.fspath(source))
    if (path / "config.txt").exists() or not path.exists():
        dtypes = dict(dtype=dtype, cache_dtype=cache_dtype)
        loaded = trained.start_loading(path, step=step, **dtypes, programs=True)()
        return Model(path.name, loaded.model, loaded.compute, loaded.tokenizer, loaded.context)
    if step is not None:
        raise UserError(f"step = {step}: {source} is a published model, without steps")
    from kvjax.convert import model as model_lib  # needs the extra `convert`

    lazy = model_lib.open(os.fspath(source))
    quantized.check(lazy.transformer.mechanisms, bits)
    tokenizer = tokenizer_lib.from_json(lazy.tokenizer_json, lazy.name)
    tokenizer.ends = origin.ends(lazy.token_files, tokenizer, lazy.transformer.vocab_size)
    compute = Compute(dtype=jnp.dtype(dtype or "float32"), cache_bits=bits)
    return Model(lazy.name, model_lib.transformer(lazy), compute, tokenizer, lazy.context)


def train(
    config: "str | os.PathLike | ml_collections.ConfigDict",
    workdir: str | os.PathLike,
    *,
    overrides: Mapping[str, object] | None = None,
    trackers: Sequence[str | Tracker] = DEFAULT,
    profile_steps: int = 0,
) -> dict[str, float]:
    """Trains to the end of the config, or resumes the workdir's run; as `kvjax train`.

    Args:
      config: a file, the name of a shipped config ("lrkv_tiny"), or a ConfigDict.
      overrides: values by key, as {"train.num_steps": 100}; with a file only.
      trackers: "tensorboard", "wandb", and objects with `write(step, record)` and `close()`, which
        get the run's records too.
      profile_steps: number of steps to trace into WORKDIR/profile, after the first three.

    Returns:
      The last validation record: step, tokens, validation_loss, validation_bpb.

    Raises:
      UserError: the config does not fit the workdir, the data or the machine.
    """
    from kvjax.foundation import command_line
    from kvjax.training import loop

    runtime.start()
    if isinstance(config, str | os.PathLike):
        flags = [f"--config.{key}={value}" for key, value in (overrides or {}).items()]
        config = command_line.load_config(pathlib.Path(config), flags)
    elif overrides:
        raise UserError("overrides: set the values in the ConfigDict")
    options = {"trackers": trackers, "profile_steps": profile_steps}
    return loop.train(config, os.fspath(workdir), **options)


def convert_model(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    method: str | None = None,
    rank: int | None = None,
    cache: float | None = None,
    **options: object,
) -> dict:
    """Imports a published model into a workdir, with a smaller KV cache; as `kvjax convert`.

    Args:
      source: a Hugging Face folder, a GGUF file, hf://OWNER/NAME, or a workdir.
      out: a new folder.
      method: "thin_keys", "lrkv", ...; None: as it is, or the default method if `cache` is given.
      rank: the method's rank.
      cache: fraction of the cache to keep.
      options: other options of `kvjax convert --help`, by name.

    Returns:
      The report: method, ranks, cache bytes, perplexity before and after.
    """
    from kvjax.convert import __main__ as command

    options = dict(method=method, rank=rank, cache=cache) | options
    return _call(command, dict(source=source, out=out) | options)


def evaluate_model(
    workdir: str | os.PathLike, *, tasks: str | Sequence[str] = (), **options: object
) -> dict:
    """Evaluates a workdir's model on benchmarks; as `kvjax evaluate`.

    Args:
      tasks: names, as ("mmlu", "gsm8k"); (): all of LRKV's Table 3.
      options: other options of `kvjax evaluate --help`, by name.

    Returns:
      The summary: scores with intervals by task, and what they depend on.
    """
    from kvjax.evaluate import __main__ as command

    return _call(command, dict(workdir=workdir, tasks=tasks or None) | options)


def _call(command: types.ModuleType, options: Mapping[str, object]) -> dict:
    """Runs a command with --json and options by name (None: the default); returns its result.

    The items of a list are joined by commas, or given one by one if the option may be repeated.
    """
    arguments, default = ["--json"], command.make_parser().get_default
    for name, value in options.items():
        if value is None or value == default(name):
            continue
        if isinstance(value, bool):
            arguments.append(f"--{'' if value else 'no-'}{name}")
        elif isinstance(value, list | tuple) and isinstance(default(name), list):
            arguments += [f"--{name}={item}" for item in value]
        elif isinstance(value, list | tuple):
            arguments.append(f"--{name}={','.join(map(str, value))}")
        else:
            arguments.append(f"--{name}={value}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command.main(arguments)
    return json.loads(printed.getvalue())


def _logits(weights, cache, tokens_BT, counts_B, *, graph, implementation):
    """Appends tokens; returns the cache and all their logits."""
    decoder = nnx.merge(graph, weights)
    x_BTD, cache = decoder(tokens_BT, cache, counts_B, implementation=implementation)
    return cache, decoder.logits(x_BTD)
