"""Models of random weights, for measurements that depend on sizes alone."""

import functools
import zlib

import ml_dtypes
import numpy as np
import tokenizers

from kvjax.convert import model as model_lib
from kvjax.data import tokenizer
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path

_DTYPE = np.dtype(ml_dtypes.bfloat16)


class RandomModel:
    """A model of normal weights in bfloat16, drawn when read; see `kvjax.convert.model.Model`.

    Args:
      context: nominal row length of its training.
    """

    chat_template, token_files = None, {}

    def __init__(self, name: str, transformer: TransformerConfig, context: int):
        self.name, self.transformer, self.context = name, transformer, context
        self.tokenizer_json = tokenizer_json(transformer.vocab_size)
        self._shapes = parameters.shapes(transformer)

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        normal = np.random.default_rng(0).standard_normal(1 << 26, np.float32)
        return (0.02 * normal).astype(_DTYPE)

    def parameters(self) -> model_lib.Parameters:
        return {path: (shape, _DTYPE) for path, shape in self._shapes.items()}

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        shape = self._shapes[path] if layer is None else self._shapes[path][1:]
        first = zlib.crc32(f"{path} {layer}".encode()) % 1000
        return np.resize(self._numbers[first:], shape)


def tokenizer_json(tokens: int) -> str:
    """Returns a byte tokenizer as JSON, padded with tokens that occur in no text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.byte_tokenizer().to_json())
    backend.add_tokens([f"<{i}>" for i in range(backend.get_vocab_size(), tokens)])
    return backend.to_str()
