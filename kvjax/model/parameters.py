"""A Transformer's parameters as shapes and axes, without any array."""

import functools
from typing import NamedTuple

from flax import nnx
import jax

from kvjax.layers.weight import axes_of
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Transformer


class Parameters(NamedTuple):
    """Two trees of equal structure; layers of a segment are stacked, as training has them."""

    shapes: dict  # ShapeDtypeStructs
    axes: dict  # axes strings, see `kvjax.layers.weight`


@functools.cache
def abstract(config: TransformerConfig) -> Parameters:
    """What `Transformer(config, key)` would hold."""
    state = nnx.state(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
    return Parameters(nnx.to_pure_dict(state), axes_of(state))
