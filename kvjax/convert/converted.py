"""A model whose attention is converted while it is read, one layer at a time."""

from collections.abc import Sequence

from flax import traverse_util
import numpy as np

from kvjax.convert import factors, layer as layer_lib, model as model_lib
from kvjax.convert.layer import Layer
from kvjax.convert.methods import Method
from kvjax.convert.model import LazyModel, Parameters
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path

_DTYPE = np.dtype(np.float32)  # of converted weights


def read_layer(model: LazyModel, index: int, moments: Sequence | None) -> tuple[Layer, np.ndarray]:
    """Returns a layer's attention and the [E, E] second moment of its inputs.

    Args:
      moments: see `ConvertedModel`; None gives `layer.identity_moment()`.
    """
    weights = model_lib.read_layer(model, index, "attention")
    mechanism, kind = model.transformer.layers[index]
    layer = layer_lib.read(weights, mechanism, rope=kind.rope_base)
    if moments is None:
        return layer, layer.identity_moment()
    moment_EE = np.asarray(moments[index], np.float64)
    return layer, moment_EE if mechanism.bias else moment_EE[:-1, :-1]


class ConvertedModel:
    """A `model.LazyModel` with attention converted; other weights are the source's.

    Attributes:
      ranks: rank of each layer's method.
      errors: by layer, the share of energy that the method lost; filled in as layers are read.
    """

    def __init__(self, source: LazyModel, by_layer: Sequence[Method], moments: Sequence | None):
        """Checks the method against every layer, before any weight is read.

        Args:
          by_layer: the method of each layer; they may differ in rank.
          moments: second moments of each layer's inputs, see `calibration.moments`; None for the
            objective "weights".

        Raises:
          UserError: the method cannot convert a layer.
        """
        config = source.transformer
        self._source, self._methods, self._moments = source, by_layer, moments
        self.name, self.context = source.name, source.context
        self.tokenizer_json, self.chat_template = source.tokenizer_json, source.chat_template
        self.token_files = source.token_files
        self.ranks = [method.rank for method in by_layer]
        self.errors: dict[int, dict[str, float]] = {}
        layer_lib.check(config.mechanisms)
        mechanisms = tuple(
            method.mechanism(mechanism, rope=kind.rope_base)
            for method, (mechanism, kind) in zip(by_layer, config.layers, strict=True)
        )
        self.transformer = TransformerConfig(
            block=config.block, mechanisms=mechanisms, vocab_size=config.vocab_size
        )
        # Kept because a layer's parameters are read one after the other.
        self._last: tuple[int, dict] | None = None

    def parameters(self) -> Parameters:
        """Returns shapes and dtypes: attention is float32, the rest as in the source."""
        source = self._source.parameters()

        def dtype(path):
            return _DTYPE if "attention" in path else source[self._in_source(path, 0)[0]][1]

        shapes = parameters.shapes(self.transformer)
        return {path: (shape, dtype(path)) for path, shape in shapes.items()}

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        if layer is None:
            return self._source.read(path)
        if "attention" not in path:
            return self._source.read(*self._in_source(path, layer))
        index = self._index(path, layer)
        if self._last is None or self._last[0] != index:
            self._last = index, self._attention(index)
        return self._last[1][path[3:]]

    def _in_source(self, path: Path, layer: int) -> tuple[Path, int]:
        """Returns a parameter's path and layer in the source, whose segments may differ."""
        if path[0] != "segments":
            return path, layer
        segment, layer = model_lib.layer_of(self._source, self._index(path, layer))
        return (path[0], segment, *path[2:]), layer

    def _index(self, path: Path, layer: int) -> int:
        """Returns the index, among all layers, of a segment's layer."""
        return sum(length for _, length in self.transformer.layer_groups[: path[1]]) + layer

    def _attention(self, index: int) -> dict[Path, np.ndarray]:
        """Returns the converted weights of a layer, by path."""
        layer, moment_EE = read_layer(self._source, index, self._moments)
        with factors.few_threads(len(moment_EE)):
            converted = self._methods[index].convert(layer, moment_EE)
        self.errors[index] = converted.errors
        flat = traverse_util.flatten_dict(converted.weights)
        return {path: w.astype(_DTYPE) for path, w in flat.items()}
