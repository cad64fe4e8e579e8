"""A model with its attention converted by a method, layer by layer as it is read."""

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

_DTYPE = np.dtype(np.float32)  # of weights that a method made


def read_layer(model: LazyModel, index: int, moments: Sequence | None) -> tuple[Layer, np.ndarray]:
    """A layer's attention, and [E, E] of what it reads: `layer.inner()` where that is not known.

    Args:
      moments: see `ConvertedModel`.
    """
    weights = model_lib.read_layer(model, index, "attention")
    rope = model.transformer.block.positions == "rope"
    layer = layer_lib.read(weights, model.transformer.mechanisms[index], rope=rope)
    return layer, layer.identity_moment() if moments is None else np.asarray(
        moments[index], np.float64
    )


class ConvertedModel:
    """See `model.Model`; what is not of attention is the source's.

    Attributes:
      ranks: of the method, by layer.
      errors: by layer, what the method lost there, of the layers that were read.
    """

    def __init__(self, source: LazyModel, by_layer: Sequence[Method], moments: Sequence | None):
        """
        Args:
          by_layer: the method of each layer; they may differ in their rank.
          moments: of each layer's inputs, see `calibration.moments`; None: of the method "weights".

        Raises:
          UserError: what a method does not convert, or lacks; before anything is read.
        """
        config = source.transformer
        self._rope = config.block.positions == "rope"
        self._source, self._methods, self._moments = source, by_layer, moments
        self.name, self.context = source.name, source.context
        self.tokenizer_json, self.chat_template = source.tokenizer_json, source.chat_template
        self.token_files = source.token_files
        self.ranks = [method.rank for method in by_layer]
        self.errors: dict[int, dict[str, float]] = {}
        layer_lib.check(config.mechanisms)
        mechanisms = tuple(
            method.mechanism(mechanism, rope=self._rope)
            for method, mechanism in zip(by_layer, config.mechanisms, strict=True)
        )
        self.transformer = TransformerConfig(
            block=config.block, mechanisms=mechanisms, vocab_size=config.vocab_size
        )
        self._now: tuple[int, dict] | None = None  # the layer that was read last, and its attention

    def parameters(self) -> Parameters:
        """Attention is float32, the rest as in the source."""
        before = self._source.parameters()

        def dtype(path):
            return _DTYPE if "attention" in path else before[self._there(path, 0)[0]][1]

        shapes = parameters.shapes(self.transformer)
        return {path: (shape, dtype(path)) for path, shape in shapes.items()}

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        if layer is None:
            return self._source.read(path)
        if "attention" not in path:
            return self._source.read(*self._there(path, layer))
        index = self._index(path, layer)
        if self._now is None or self._now[0] != index:
            self._now = index, self._attention(index)
        return self._now[1][path[3:]]

    def _there(self, path: Path, layer: int) -> tuple[Path, int]:
        """Where the source has a parameter: its layers may be in other segments."""
        if path[0] != "segments":
            return path, layer
        segment, layer = model_lib.layer_of(self._source, self._index(path, layer))
        return (path[0], segment, *path[2:]), layer

    def _index(self, path: Path, layer: int) -> int:
        """Which of all layers a layer of a segment is."""
        return sum(length for _, length in self.transformer.layer_groups[: path[1]]) + layer

    def _attention(self, index: int) -> dict[Path, np.ndarray]:
        """The converted weights of a layer, by path."""
        layer, moment_EE = read_layer(self._source, index, self._moments)
        with factors.few_threads(len(moment_EE)):
            converted = self._methods[index].convert(layer, moment_EE)
        self.errors[index] = converted.errors
        flat = traverse_util.flatten_dict(converted.weights)
        return {path: w.astype(_DTYPE) for path, w in flat.items()}
