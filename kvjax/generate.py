"""Text from a trained model."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer


def sample(
    graph: nnx.GraphDef,
    weights: dict,
    prompt: list[int],
    *,
    num_tokens: int,
    length: int,
    key: jax.Array,
    compute: Compute = Compute(),
    temperature: float = 0.8,
) -> list[int]:
    """`num_tokens` token ids that follow the prompt, each from a full forward pass over the window.

    Args:
      graph, weights: a Transformer, split.
      length: tokens of context: later ones push out the first.
      key: the same key gives the same text.
    """
    ids = list(prompt)
    for i in range(num_tokens):
        window = ids[-length:]
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(window)] = window
        last = np.int32(len(window) - 1)
        step_key = jax.random.fold_in(key, i)
        ids.append(
            int(_next(weights, tokens, last, step_key, temperature, graph=graph, compute=compute))
        )
    return ids[len(prompt) :]


@functools.partial(jax.jit, static_argnames=("graph", "compute"))
def _next(weights, tokens_1T, last, key, temperature, *, graph, compute) -> jax.Array:
    model: Transformer = nnx.merge(graph, weights)
    x_1TD = model(tokens_1T, compute=compute)
    x_11D = jax.lax.dynamic_slice_in_dim(x_1TD, last, 1, axis=1)
    logits_V = model.logits(x_11D, compute=compute)[0, 0]
    return jax.random.categorical(key, logits_V / jnp.asarray(temperature, logits_V.dtype))
