"""Second moments of what enters each layer's attention, on calibration text, layer by layer.

One layer's weights are in memory at a time, and the activations of all rows.
"""

from collections.abc import Iterator
import functools

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.convert import model as model_lib
from kvjax.convert.model import Model
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.model.transformer import Block
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer

ROWS_AT_ONCE = 4


def moments(model: Model, rows_BT: np.ndarray) -> list[np.ndarray]:
    """[E, E] of every layer: the mean of x x^T over tokens, float32, a 1 after x.

    That 1 is for biases; where a layer has none its row and column are left out.
    """
    found = []
    with progress.waiting("calibrating") as doing:
        for i, (mechanism, moment_EE) in enumerate(_layers(model, rows_BT)):
            doing.at(f"{i + 1} of {model.transformer.block.num_layers} layers")
            found.append(moment_EE if mechanism.bias else moment_EE[:-1, :-1])
    return found


def _layers(model: Model, rows_BT: np.ndarray) -> Iterator[tuple]:
    """Each layer's mechanism, and the moment of its inputs with the 1."""
    config = model.transformer
    c, T = config.block, rows_BT.shape[1]
    compute = Compute(query_chunk=64)
    batches = _embed(model, _in_batches(rows_BT), compute)
    index = np.arange(T, dtype=np.int32)[None]

    @functools.cache  # layers alike share a program
    def program(mechanism):
        block = nnx.eval_shape(lambda: Block(c, mechanism, rngs=nnx.Rngs(0)))
        graph, _ = nnx.split(block)

        @jax.jit
        def run(weights, x_BTD):
            block = nnx.merge(graph, weights)
            h_BTD = block.attention_norm(x_BTD)
            h_BTE = jnp.concatenate([h_BTD, jnp.ones_like(h_BTD[..., :1])], axis=-1)
            sums_EE = jnp.einsum("BTE,BTF->EF", h_BTE, h_BTE, precision="highest")
            positions = rope.positions(index, mechanism.rope_dim, c.angles_base)
            mask = dict(causal=c.causal, window=c.window)
            return sums_EE, block(x_BTD, positions, **mask, compute=compute)

        return run

    for i, mechanism in enumerate(config.mechanisms):
        run = program(mechanism)
        weights = jax.tree.map(
            lambda w: jnp.asarray(w, jnp.float32), model_lib.read_layer(model, i)
        )
        total = 0.0
        for b, x_BTD in enumerate(batches):
            sums_EE, batches[b] = run(weights, x_BTD)
            total = total + np.asarray(sums_EE, np.float64)
        if not np.isfinite(total).all():
            raise UserError(f"layer {i} of {model.name}: its inputs on the text are not finite")
        yield mechanism, (total / rows_BT.size).astype(np.float32)


def _in_batches(rows_BT: np.ndarray) -> list[np.ndarray]:
    return [rows_BT[i : i + ROWS_AT_ONCE] for i in range(0, len(rows_BT), ROWS_AT_ONCE)]


def _embed(model: Model, batches: list[np.ndarray], compute: Compute) -> list[jax.Array]:
    """What enters the first block, [B, T, D] each."""
    make = lambda: Transformer(model.transformer, jax.random.key(0))
    graph, state = nnx.split(nnx.eval_shape(make))
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(state))  # shapes: blocks are not needed
    for path in flat:
        if path[0] in ("embedding", "positions", "embedding_norm"):
            flat[path] = jnp.asarray(model.read(path), jnp.float32)
    whole = nnx.merge(graph, traverse_util.unflatten_dict(flat))
    index = np.arange(batches[0].shape[1], dtype=np.int32)[None]
    return [whole.embed(rows, index, compute) for rows in batches]
