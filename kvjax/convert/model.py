"""`LazyModel`, the interface of all models that are read one parameter of one layer at a time.

Implemented by `TrainedModel` (a workdir), `published.PublishedModel`,
`factored_format.FactoredModel` (an export), and by `converted.ConvertedModel` and
`dense.DenseModel`, which change another model.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
from typing import Protocol

from etils import epath
from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import config as config_lib
from kvjax.attention import kind_of
from kvjax.convert import tensors
from kvjax.data import manifest
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path
from kvjax.model.transformer import Transformer
from kvjax.published import hub
from kvjax.workdir import origin, storage, trained

Parameters = Mapping[Path, tuple[tuple[int, ...], np.dtype]]


class LazyModel(Protocol):
    """A model whose weights are read on demand, one parameter of one layer at a time.

    Attributes:
      name: the model's name in messages.
      transformer: the model's config.
      context: training context length in tokens.
      tokenizer_json: content of `tokenizer.json`.
      chat_template: in Jinja, or None.
      token_files: special tokens as published files name them, see `tokens`.
    """

    name: str
    transformer: TransformerConfig
    context: int
    tokenizer_json: str
    chat_template: str | None
    token_files: origin.TokenFiles

    def parameters(self) -> Parameters:
        """Returns shape and dtype of every parameter, with a segment's layers as the first axis."""

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        """Returns a parameter; for a segment, the slice of its `layer`."""


def open(source: str, option: str = "--source") -> LazyModel:
    """Opens the model of a workdir, an export, or a published model (also hf://OWNER/NAME).

    Args:
      option: command-line option that gives the source, for messages.

    Raises:
      UserError: see `trained.find`, `factored_format.FactoredModel` and `published.open`.
    """
    if hub.is_name(source):
        source = str(hub.model(option, source))
    path = runtime.path(option, source)
    if (path / "config.txt").exists():
        return TrainedModel(path)
    # Imported late: their packages are an extra.
    from kvjax.convert import factored_format, published
    from kvjax.published import source as source_lib

    folder = path if in_bucket(path) else source_lib.model_path(path)
    if factored_format.is_there(folder):
        return factored_format.FactoredModel(folder)
    return published.open(source)


class TrainedModel:
    """The model of a workdir's latest checkpoint, or of a snapshot."""

    def __init__(self, workdir: epath.Path | trained.SavedModel):
        saved = workdir if isinstance(workdir, trained.SavedModel) else trained.find(workdir)
        self.name, self.step = saved.workdir.name, saved.step
        self.transformer = saved.experiment.model
        self.context, self.token_files = saved.context, saved.token_files
        self.tokenizer_json = (saved.workdir / manifest.TOKENIZER).read_text()
        self.chat_template = saved.template
        self._item = saved.checkpoints / str(saved.step) / "state"
        self._shapes = parameters.shapes(self.transformer)
        trained.checkpoint.check_parameters(
            saved.checkpoints, saved.step, parameters.abstract(self.transformer).shapes
        )

    def parameters(self) -> Parameters:
        return {path: (shape, self._dtype(path)) for path, shape in self._shapes.items()}

    def _dtype(self, path: Path) -> np.dtype:
        with self._reading(path):
            return np.dtype(self._array(path).dtype.numpy_dtype)

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        with self._reading(path):
            array = self._array(path)
            values = np.asarray((array if layer is None else array[layer]).read().result())
        advice = "train again from an earlier checkpoint"
        return tensors.check_finite(values, self._named(path), advice)

    def _array(self, path: Path):
        return storage.array(self._item, ".".join(map(str, ("params", *path))))

    def _named(self, path: Path) -> str:
        return f"{self._item}: {'.'.join(map(str, path))}"

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """Turns errors while a parameter is read into a UserError that names it."""
        try:
            yield
        except Exception as error:  # damaged files raise many types
            raise UserError(
                f"{self._named(path)} cannot be read ({storage.reason(error)}): restore its files, "
                "or give another workdir"
            ) from error


def layer_of(model: LazyModel, index: int) -> tuple[int, int]:
    """Returns the segment of a layer, and its index there."""
    for segment, (_, length) in enumerate(model.transformer.layer_groups):
        if index < length:
            return segment, index
        index -= length
    raise IndexError(index)


def read_parameter(model: LazyModel, index: int, *path: str) -> np.ndarray:
    """Returns a parameter of one layer, by its path below a `Block`."""
    segment, layer = layer_of(model, index)
    return model.read(("segments", segment, *path), layer)


def read_layer(model: LazyModel, index: int, *part: str) -> dict:
    """Returns the weights of one layer, as a pure dict of a `Block`.

    Args:
      part: path below a `Block`, such as "attention", to read only these weights.
    """
    segment, layer = layer_of(model, index)
    prefix = ("segments", segment, *part)
    depth = len(prefix)
    paths = [path for path in model.parameters() if path[:depth] == prefix]
    return traverse_util.unflatten_dict({path[depth:]: model.read(path, layer) for path in paths})


def transformer(model: LazyModel) -> Transformer:
    """Returns the whole model in memory, in float32."""
    flat = {}
    for path, (shape, _) in model.parameters().items():
        if path[0] != "segments":
            flat[path] = np.asarray(model.read(path), np.float32)
            continue
        flat[path] = np.empty(shape, np.float32)
    for segment, (_, length) in enumerate(model.transformer.layer_groups):
        for layer in range(length):
            for path, stacked in flat.items():
                if path[:2] == ("segments", segment):
                    stacked[layer] = model.read(path, layer)
    weights = jax.tree.map(jnp.asarray, traverse_util.unflatten_dict(flat))
    return nnx.merge(parameters.graph(model.transformer), weights)


def attention_section(config: TransformerConfig) -> dict:
    """Returns config.attention of a model, with `layer_ranks` if layers differ in rank.

    Raises:
      UserError: layers differ in more than rank, which no config can express.
    """
    first = config.mechanisms[0]
    section = dict(kind=kind_of(first)) | dataclasses.asdict(first)
    keys = config_lib.rank_keys(first)
    ranks = ()
    if keys:
        ranks = tuple(getattr(mechanism, keys[0], 0) for mechanism in config.mechanisms)
    if len(set(ranks)) == 1:
        ranks = ()
    expressible = (first,) * len(config.mechanisms)
    if ranks:
        expressible = tuple(
            dataclasses.replace(first, **dict.fromkeys(keys, rank)) for rank in ranks
        )
    if expressible != tuple(config.mechanisms):
        raise UserError("layers differ in more than their rank: no config describes them")
    return section | (dict(layer_ranks=ranks) if keys else {})
