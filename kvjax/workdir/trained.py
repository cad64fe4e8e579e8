"""Finds and loads the trained model of a workdir."""

from collections.abc import Callable
import dataclasses
import functools

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections

from kvjax import config as config_lib
from kvjax.cache import quantized
from kvjax.conversation import specials
from kvjax.conversation.jinja_process import LimitError
from kvjax.conversation.template import Template
from kvjax.data import manifest, tokenizer as tokenizer_lib
from kvjax.data.tokenizer import Tokenizer
from kvjax.decoding import engine
from kvjax.foundation import json_text, runtime
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, warn
from kvjax.model import parameters
from kvjax.model.transformer import Compute, Transformer, compute_dtypes
from kvjax.workdir import checkpoint, origin, storage


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a workdir with its config and tokenizer; no array is read yet."""

    workdir: epath.Path
    step: int
    experiment: config_lib.Experiment
    tokenizer: Tokenizer  # with the end and control tokens of the published model, if it is one
    context: int  # longest rows that the model was trained on, in tokens
    token_files: origin.TokenFiles
    template: str | None  # chat template, Jinja
    folder: str = checkpoint.CHECKPOINTS  # or SNAPSHOTS

    @property
    def checkpoints(self) -> epath.Path:
        return self.workdir / self.folder


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A trained model with its parameters."""

    model: Transformer
    compute: Compute
    tokenizer: Tokenizer
    context: int  # see `SavedModel`
    step: int


def load(
    workdir: epath.Path, *, step: int | None = None, dtype: str = "", cache_dtype: str = ""
) -> LoadedModel:
    """Loads a checkpoint's model onto one device, in compute dtypes.

    Args:
      step: step of the checkpoint; None: the latest.
      dtype: overrides the run's config.compute.dtype.
      cache_dtype: "int8" or "int4" for a quantised cache; "": in the compute dtype.

    Raises:
      UserError: the workdir or the checkpoint does not exist, or cannot be read; its mechanisms
        cannot have this cache_dtype.
    """
    return start_loading(workdir, step=step, dtype=dtype, cache_dtype=cache_dtype)()


def start_loading(
    workdir: epath.Path,
    *,
    step: int | None = None,
    dtype: str = "",
    cache_dtype: str = "",
    programs: bool = False,
    implementation: str | None = None,
) -> Callable[..., LoadedModel]:
    """Starts to read a model in threads; for further arguments and errors see `load`.

    Args:
      programs: also load the stored programs of `Generator(..., stored=True)`.
      implementation: implementation of decode attention, as in `Generator`.

    Returns:
      A function that waits for the model. It takes the model's `SavedModel`; None: calls `find`.
    """
    workdir = runtime.workdir(workdir)
    experiment, step = experiment_of(workdir), _existing_step(workdir, step)
    config, compute = experiment.model, compute_of(experiment, dtype, cache_dtype)
    if programs:
        engine.start_loading(config, compute, implementation=implementation)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = parameters.abstract(config).shapes
    dtypes = compute_dtypes(abstract, compute.dtype)
    if compute.cache_bits is not None:  # `Decoder` changes attention's basis before it casts
        dtypes = jax.tree_util.tree_map_with_path(_stored_attention, abstract, dtypes)
    abstract = jax.tree.map(
        lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding), abstract, dtypes
    )
    read = checkpoint.start_reading(workdir / checkpoint.CHECKPOINTS, step, abstract)

    def finish(saved: SavedModel | None = None) -> LoadedModel:
        saved = saved or find(workdir, step=step)
        model = nnx.merge(parameters.graph(config), read())
        return LoadedModel(model, compute, saved.tokenizer, saved.context, step)

    return finish


def _stored_attention(path: tuple, w: jax.ShapeDtypeStruct, dtype: jnp.dtype) -> jnp.dtype:
    """Returns the stored dtype of a weight of attention, `dtype` for another."""
    return w.dtype if any(key.key == "attention" for key in path) else dtype


def compute_of(
    experiment: config_lib.Experiment, dtype: str = "", cache_dtype: str = ""
) -> Compute:
    """Resolves a run's compute options for this machine; dtypes are as in `load`."""
    compute, bits = experiment.compute, quantized.bits_of(cache_dtype)
    quantized.check(experiment.model.mechanisms, bits)
    if dtype:
        one_of("dtype", dtype, config_lib.DTYPES)
        compute = dataclasses.replace(compute, dtype=dtype)
    compute = compute.resolve(jax.devices()[0].platform, experiment.model.block.num_layers)
    return dataclasses.replace(compute, cache_bits=bits)


def find(workdir: epath.PathLike, *, step: int | None = None) -> SavedModel:
    """Finds the checkpoint of a step in a workdir (None: the latest).

    Raises:
      UserError: the workdir or the checkpoint does not exist; the tokenizer or a file of `origin`
        cannot be read.
    """
    workdir = runtime.workdir(workdir)
    experiment = experiment_of(workdir)
    step = _existing_step(workdir, step)
    tokenizer = _tokenizer(workdir, experiment.model.vocab_size)
    token_files = origin.token_files(workdir)
    tokenizer.ends = origin.ends(token_files, tokenizer, experiment.model.vocab_size)
    template = origin.chat_template(workdir)
    if template is not None and specials.missing(tokenizer):
        try:
            tokenizer = Template(tokenizer, template, token_files).tokenizer
        except LimitError as error:
            _warn_once(f"{workdir}: {error}; until then its control tokens are ordinary text")
        except UserError:  # an invalid template is reported only if it is used
            pass
    return SavedModel(
        workdir,
        step,
        experiment,
        tokenizer,
        context=origin.context(workdir, experiment.data.sequence_length),
        token_files=token_files,
        template=template,
    )


def _existing_step(workdir: epath.Path, step: int | None) -> int:
    """Returns `step` (None: the latest), or raises a UserError if it has no checkpoint."""
    steps = storage.steps(workdir / checkpoint.CHECKPOINTS)
    if not steps:
        raise UserError(f"{workdir} has no checkpoint yet: train on, or give another --workdir")
    if step is not None and step not in steps:
        raise UserError(f"step = {step}: {workdir} has no such checkpoint; it has {steps}")
    return steps[-1] if step is None else step


def snapshots(workdir: epath.PathLike) -> list[SavedModel]:
    """Finds a run's snapshots, ascending by step; see `snapshot_every`.

    Raises:
      UserError: see `find`.
    """
    latest = find(workdir)
    steps = storage.steps(latest.workdir / checkpoint.SNAPSHOTS)
    folder = checkpoint.SNAPSHOTS
    return [dataclasses.replace(latest, step=step, folder=folder) for step in steps]


def named(key: str, text: str) -> SavedModel:
    """Finds the model that a config key's value names: WORKDIR or WORKDIR@STEP.

    Raises:
      UserError: see `find`; the message starts with the key.
    """
    path, at, number = text.rpartition("@")
    by_step = at and number.isdecimal()
    try:
        if by_step:
            return find(runtime.path(key, path), step=int(number))
        return find(runtime.path(key, text))
    except UserError as error:
        raise UserError(f"{key} = {text!r}: {error}") from error


def experiment_of(workdir: epath.Path) -> config_lib.Experiment:
    """Resolves a workdir's config.json with the default mesh.

    Raises:
      UserError: the workdir does not exist, or its config cannot be read.
    """
    path = runtime.workdir(workdir) / "config.json"
    if not path.exists():
        raise UserError(
            f"{workdir} is no workdir of a run ({path.name} is missing): give one as --workdir; "
            "`make demo` trains runs/lrkv_tiny, `python -m kvjax.main --workdir=runs/NAME` others"
        )
    tree = json_text.read_object(path, "restore it, or train again")
    if "model_type" in tree:
        raise UserError(
            f"{workdir} is a published model, and no workdir yet: `python -m kvjax.convert "
            f"--source={workdir} --out=runs/NAME` makes one"
        )
    try:  # config.json has no mesh, since that is not part of a run's identity
        return config_lib.resolve(ml_collections.ConfigDict(tree | {"mesh": {}}))
    except (UserError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: {error}") from error


@functools.cache
def _warn_once(text: str) -> None:
    warn(text)


def _tokenizer(workdir: epath.Path, vocab_size: int) -> Tokenizer:
    path = workdir / manifest.TOKENIZER
    if not path.exists():
        raise UserError(
            f"{path} is missing: run the command that trained {workdir} again. It writes the file, "
            "and if the run is complete it changes nothing else"
        )
    tokenizer = tokenizer_lib.load(path)
    if tokenizer.vocab_size > vocab_size:  # fewer is fine: published models have unused rows
        raise UserError(
            f"{path} has {tokenizer.vocab_size} tokens, the model {vocab_size}: restore the file "
            "that belongs to the run"
        )
    return tokenizer
