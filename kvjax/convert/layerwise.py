"""A forward pass that keeps all rows' activations in memory, but only one layer's weights."""

from collections.abc import Callable, Collection, Iterator
import functools

from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import Attention
from kvjax.convert import model as model_lib
from kvjax.convert.model import LazyModel
from kvjax.layers import rope
from kvjax.model import loss, parameters
from kvjax.model.layer_kinds import LayerKind
from kvjax.model.transformer import Block, Compute, Transformer

BATCH_ROWS = 4
_BATCH_TOKENS = 4096  # limit for batches of long rows: attention's memory is quadratic in length
_COMPUTE = Compute(query_chunk=64)


class LayerwisePass:
    """A forward pass of rows of tokens, layer by layer, in float32.

    Attributes:
      x: [B, T, D] activations of each batch of rows, after the layers that have been run.

    Args:
      attention: class that replaces `Attention` in the blocks; it must have the same weights.
    """

    def __init__(
        self, model: LazyModel, rows_BT: np.ndarray, *, attention: type[Attention] = Attention
    ):
        self._model, self._attention = model, attention
        outer = _load_outer(model, ("embedding", "positions", "embedding_norm"))
        index = np.arange(rows_BT.shape[1], dtype=np.int32)[None]
        self.x = [outer.embed(batch_BT, index, _COMPUTE) for batch_BT in row_batches(rows_BT)]
        _free(outer)

    def layers(self, observe: Callable[..., jax.Array] | None = None) -> Iterator[list]:
        """Runs the layers one by one; yields per layer the results of `observe`, one per batch.

        Args:
          observe: function of a layer's attention, its inputs [B, T, D], their positions, and a
            dict of attention's options (`causal` and those of `LayerKind.attend`).
        """
        length = self.x[0].shape[1]

        @functools.cache  # layers of equal shape and kind share one program
        def program(mechanism, kind):
            return _program(self._model, mechanism, kind, self._attention, length, observe)

        for i, (mechanism, kind) in enumerate(self._model.transformer.layers):
            weights = jax.tree.map(
                lambda w: jnp.asarray(w, jnp.float32), model_lib.read_layer(self._model, i)
            )
            observed = []
            for b, x_BTD in enumerate(self.x):
                result, self.x[b] = program(mechanism, kind)(weights, x_BTD)
                observed.append(result)
            # Wait, since a queued layer would already allocate its temporary buffers.
            jax.block_until_ready(self.x)
            yield observed

    def losses(self, targets_BT: np.ndarray) -> Iterator[np.ndarray]:
        """Yields [B, T] losses in nats per batch, after the last layer."""
        c = self._model.transformer.block
        outer = _load_outer(self._model, ("embedding" if c.tied_head else "head", "final_norm"))
        graph, norm = nnx.split(outer.final_norm or _Identity())
        head_DV, softcap = outer.head_weight(_COMPUTE), c.logit_softcap

        @jax.jit
        def nats(norm, head_DV, x_BTD, targets_BT):
            x_BTD = nnx.merge(graph, norm)(x_BTD) / c.logit_divisor
            return loss.losses_from_hidden(head_DV, x_BTD, targets_BT, softcap, _COMPUTE)

        for x_BTD, batch_BT in zip(self.x, row_batches(targets_BT), strict=True):
            yield np.asarray(nats(norm, head_DV, x_BTD, batch_BT))
        head_DV.delete()  # a tied embedding was copied; `_free` would miss the copy
        _free(outer)


class _Identity(nnx.Module):
    """Stands in for the final norm of a model without one."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def row_batches(rows_BT: np.ndarray) -> list[np.ndarray]:
    """Splits rows into batches of at most `BATCH_ROWS` rows and `_BATCH_TOKENS` tokens."""
    size = max(1, min(BATCH_ROWS, _BATCH_TOKENS // rows_BT.shape[1]))
    return [rows_BT[i : i + size] for i in range(0, len(rows_BT), size)]


def _load_outer(model: LazyModel, names: Collection[str]) -> Transformer:
    """Returns the model with the named top-level weights loaded; the others stay abstract."""
    flat = traverse_util.flatten_dict(parameters.abstract(model.transformer).shapes)
    for path in flat:
        if path[0] in names:
            flat[path] = jnp.asarray(model.read(path), jnp.float32)
    graph = parameters.graph(model.transformer)
    return nnx.merge(graph, traverse_util.unflatten_dict(flat))


def _free(outer: Transformer) -> None:
    """Frees loaded weights now: modules have reference cycles, which Python collects late."""
    for w in jax.tree.leaves(nnx.state(outer)):
        if isinstance(w, jax.Array) and not w.is_deleted():
            w.delete()


def block_class(model: LazyModel) -> type[Block]:
    """Returns the class of the model's layers: its own `block`, or `Block`."""
    return getattr(model, "block", Block)


def _program(
    model: LazyModel, mechanism, kind: LayerKind, attention: type[Attention], length: int, observe
):
    """Returns a block's compiled forward pass: (weights, x) to (observed, new x)."""
    c = model.transformer.block

    def make_block():
        block = block_class(model)(c, mechanism, rngs=nnx.Rngs(0))
        block.attention = attention(mechanism, c.d_model, rngs=nnx.Rngs(0))
        return block

    graph, _ = nnx.split(nnx.eval_shape(make_block))
    index = np.arange(length, dtype=np.int32)[None]

    @jax.jit
    def run(weights, x_BTD):
        block = nnx.merge(graph, weights)
        positions = rope.positions(index, mechanism.rope_dim, kind.rope_base)
        attend = dict(causal=c.causal) | kind.attend
        observed = ()
        if observe:
            observed = observe(block.attention, block.attention_input(x_BTD), positions, attend)
        return observed, block(x_BTD, positions, **attend, compute=_COMPUTE)

    return run
