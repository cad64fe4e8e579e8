"""A Transformer without any array: its parameters as shapes and axes, and what makes it whole."""

import functools
from typing import NamedTuple

from flax import nnx, traverse_util
import jax

from kvjax.layers.weight import Axes, axes_of
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Transformer

Path = tuple[str | int, ...]  # of a parameter, as in nnx.to_pure_dict(nnx.state(model))


class Parameters(NamedTuple):
    """Two trees of equal structure; layers of a segment are stacked, as training has them."""

    shapes: dict  # ShapeDtypeStructs
    axes: dict  # axes strings, see `kvjax.layers.weight`


def abstract(config: TransformerConfig) -> Parameters:
    """What `Transformer(config, key)` would hold; of equal configs the same object, to be read."""
    return _split(config)[1]


def graph(config: TransformerConfig) -> nnx.GraphDef:
    """What `nnx.merge` needs beside the parameters; of equal configs the same object."""
    return _split(config)[0]


@functools.cache
def _split(config: TransformerConfig) -> tuple[nnx.GraphDef, Parameters]:
    made = nnx.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    definition, state = nnx.split(made)
    return definition, Parameters(nnx.to_pure_dict(state), axes_of(state))


def shapes(config: TransformerConfig) -> dict[Path, tuple[int, ...]]:
    """The shape of every parameter, layers of a segment in front."""
    flat = traverse_util.flatten_dict(abstract(config).shapes)
    return {path: tuple(x.shape) for path, x in flat.items()}


def axes(config: TransformerConfig) -> dict[Path, Axes]:
    """The axes of every parameter; of a segment those of one layer."""
    flat = traverse_util.flatten_dict(abstract(config).axes)
    return {path: Axes.parse(text) for path, text in flat.items()}
