"""A trained model from its workdir."""

import dataclasses
import functools

from etils import epath
from flax import nnx
import jax
import ml_collections

from kvjax import config as config_lib
from kvjax.conversation import specials
from kvjax.conversation.jinja_process import LimitError
from kvjax.conversation.template import Template
from kvjax.data import manifest, tokenizer as tokenizer_lib
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation import json_text, runtime
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, warn
from kvjax.model import parameters
from kvjax.model.transformer import Compute, Transformer, compute_dtypes
from kvjax.workdir import checkpoint, origin, storage


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a workdir, and what is known of it before any array is read."""

    workdir: epath.Path
    step: int
    experiment: config_lib.Experiment
    tokenizer: Tokenizer  # with the ends and control tokens that its model was published with
    context: int  # tokens that the model was trained on, in this run or before
    token_files: origin.TokenFiles
    template: str | None  # of conversations, in Jinja
    folder: str = checkpoint.CHECKPOINTS  # in the workdir; or that of snapshots

    @property
    def checkpoints(self) -> epath.Path:
        return self.workdir / self.folder


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A trained model from a workdir."""

    model: Transformer
    compute: Compute
    tokenizer: Tokenizer
    context: int  # tokens that it was trained on, in this run or before
    step: int


def load(workdir: epath.Path, *, step: int | None = None, dtype: str = "") -> LoadedModel:
    """The model of a workdir's checkpoint, on one device, in the dtype it computes in.

    Args:
      step: of the checkpoint; None: the latest.
      dtype: instead of the run's config.compute.dtype.

    Raises:
      UserError: not a workdir, no (such) checkpoint, one that cannot be read or of another model.
    """
    found = find(workdir, step=step)
    config, compute = found.experiment.model, compute_of(found, dtype)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = parameters.abstract(config).shapes
    place = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
    params = checkpoint.read_parameters(
        found.checkpoints,
        found.step,
        jax.tree.map(place, abstract, compute_dtypes(abstract, compute.dtype)),
    )
    model = nnx.merge(parameters.graph(config), params)
    return LoadedModel(model, compute, found.tokenizer, found.context, found.step)


def compute_of(found: SavedModel, dtype: str = "") -> Compute:
    """How a model is computed here.

    Args:
      dtype: instead of the run's config.compute.dtype.
    """
    compute = found.experiment.compute
    if dtype:
        one_of("dtype", dtype, config_lib.DTYPES)
        compute = dataclasses.replace(compute, dtype=dtype)
    num_layers = found.experiment.model.block.num_layers
    return compute.resolve(jax.devices()[0].platform, num_layers)


def find(workdir: epath.PathLike, *, step: int | None = None) -> SavedModel:
    """A workdir's checkpoint of that step, or the latest.

    Raises:
      UserError: not a workdir, or no (such) checkpoint, or a tokenizer of another model, or a file
        of `origin` that cannot be read.
    """
    workdir = runtime.workdir(workdir)
    experiment = experiment_of(workdir)
    steps = storage.steps(workdir / checkpoint.CHECKPOINTS)
    if not steps:
        raise UserError(f"{workdir} has no checkpoint yet: train on, or give another --workdir")
    if step is not None and step not in steps:
        raise UserError(f"step = {step}: {workdir} has no such checkpoint; it has {steps}")
    tokenizer = _tokenizer(workdir, experiment.model.vocab_size)
    token_files = origin.token_files(workdir)
    tokenizer.ends = origin.ends(token_files, tokenizer, experiment.model.vocab_size)
    template = origin.chat_template(workdir)
    if template is not None and specials.missing(tokenizer):
        try:
            tokenizer = Template(tokenizer, template, token_files).tokenizer
        except LimitError as error:
            _warn_once(f"{workdir}: {error}; until then its control tokens are ordinary text")
        except UserError:  # a template that is none: who talks by it is told
            pass
    return SavedModel(
        workdir,
        steps[-1] if step is None else step,
        experiment,
        tokenizer,
        context=origin.context(workdir, experiment.data.sequence_length),
        token_files=token_files,
        template=template,
    )


def snapshots(workdir: epath.PathLike) -> list[SavedModel]:
    """The parameters that a run kept of some of its steps, ascending; see `snapshot_every`.

    Raises:
      UserError: see `find`.
    """
    found = find(workdir)
    steps = storage.steps(found.workdir / checkpoint.SNAPSHOTS)
    of_step = dict(folder=checkpoint.SNAPSHOTS)
    return [dataclasses.replace(found, step=step, **of_step) for step in steps]


def named(key: str, text: str) -> SavedModel:
    """What a config's key names: a workdir, or WORKDIR@STEP.

    Raises:
      UserError: as `find`; the message begins with the key.
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
    """What a workdir's config.json describes, without the mesh it was trained on.

    Raises:
      UserError: not a workdir, or a config that cannot be read.
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
    try:  # the mesh is no part of what was trained
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
            f"{path} is missing: run the command that trained {workdir} again, which writes the "
            "file (and of a complete run changes nothing else)"
        )
    tokenizer = tokenizer_lib.load(path)
    if tokenizer.vocab_size > vocab_size:  # published models have more: rows that no token uses
        raise UserError(
            f"{path} has {tokenizer.vocab_size} tokens, the model {vocab_size}: restore the file "
            "that belongs to the run"
        )
    return tokenizer
