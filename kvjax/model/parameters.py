"""Parameters of a Transformer as shapes and axes, without allocating arrays."""

import functools
from typing import NamedTuple

from flax import nnx, traverse_util
import jax

from kvjax.layers.weight import Axes, axes_of
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Transformer

Path = tuple[str | int, ...]  # a parameter's path in nnx.to_pure_dict(nnx.state(model))


class Parameters(NamedTuple):
    """Shapes and axes as trees of equal structure; layers of a layer group are stacked."""

    shapes: dict  # ShapeDtypeStructs
    axes: dict  # axes strings, see `kvjax.layers.weight`


def abstract(config: TransformerConfig) -> Parameters:
    """Returns the parameters of `Transformer(config, key)`; cached per config, so do not mutate."""
    return _split(config)[1]


def graph(config: TransformerConfig) -> nnx.GraphDef:
    """Returns the graph definition that `nnx.merge` needs; cached per config."""
    return _split(config)[0]


@functools.cache
def _split(config: TransformerConfig) -> tuple[nnx.GraphDef, Parameters]:
    model = nnx.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    definition, state = nnx.split(model)
    return definition, Parameters(nnx.to_pure_dict(state), axes_of(state))


def shapes(config: TransformerConfig) -> dict[Path, tuple[int, ...]]:
    """Returns the shape of every parameter; the layers of a group are the first axis."""
    flat = traverse_util.flatten_dict(abstract(config).shapes)
    return {path: tuple(x.shape) for path, x in flat.items()}


def axes(config: TransformerConfig) -> dict[Path, Axes]:
    """Returns the axes of every parameter, without the layer axis."""
    flat = traverse_util.flatten_dict(abstract(config).axes)
    return {path: Axes.parse(text) for path, text in flat.items()}
