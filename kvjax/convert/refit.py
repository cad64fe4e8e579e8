"""Regresses a converted model's output projections on the original attention's outputs.

A method fits keys and values. Afterwards a least-squares fit of W_out, in closed form, removes the
errors of attention's outputs that are linear in the heads' outputs. Every layer gets the original
model's inputs, so layers are independent and only one is in memory.
"""

from collections.abc import Callable, Iterator, Sequence
import functools

from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from kvjax.attention import Attention
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.layerwise import LayerwisePass
from kvjax.convert.methods import Method
from kvjax.convert.model import LazyModel
from kvjax.layers import rope
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.layer_kinds import LayerKind
from kvjax.model.parameters import Path

LEAST_ROWS = 2  # one to regress on, one to measure on
_HELD_OUT = 8  # one row in 8 is held out, and decides whether a layer's regression is kept
_RIDGE = 1e-4  # pull towards the unchanged weights, relative to the heads' mean squared output


def converted_model(
    source: LazyModel, methods: list[Method], moments: Sequence | None, rows_BT: np.ndarray | None
) -> ConvertedModel:
    """Returns the converted model, with regressed output projections if rows are given."""
    if rows_BT is None:
        return ConvertedModel(source, methods, moments)
    return RefittedModel(source, methods, moments, rows_BT)


class RefittedModel(ConvertedModel):
    """A converted model with regressed output projections.

    Layers must be read in order; reading the first one restarts the original's forward pass.

    Attributes:
      outputs_lost: by layer, the lost share of the outputs' energy on held-out rows, before and
        after the regression; filled in as layers are read.
    """

    def __init__(
        self, source: LazyModel, by_layer: list[Method], moments: list, rows_BT: np.ndarray
    ):
        super().__init__(source, by_layer, moments)
        self.outputs_lost: dict[int, tuple[float, float]] = {}
        self._rows_BT, self._next = rows_BT, 0

    def _attention(self, index: int) -> dict[Path, np.ndarray]:
        if index == 0:
            self._observed, self._next = _observe(self._source, self._rows_BT), 0
        if index != self._next:
            raise ValueError(f"layer {index} is read, but layer {self._next} is next")
        self._next += 1
        weights, batches = super()._attention(index), next(self._observed)
        heads = _heads(self.transformer, index, weights, length=batches[0][0].shape[1])
        rows = [
            row
            for h_BTD, y_BTD in batches
            for row in zip(heads(h_BTD), np.asarray(y_BTD, np.float64), strict=True)
        ]
        held, before_XD = max(1, len(rows) // _HELD_OUT), _projection(weights)
        after_XD = _regressed(rows[:-held], before_XD)
        lost = [_lost(rows[-held:], w_XD) for w_XD in (before_XD, after_XD)]
        self.outputs_lost[index] = lost[0], min(lost)
        return weights | _from_projection(after_XD, weights) if lost[1] < lost[0] else weights


def _observe(model: LazyModel, rows_BT: np.ndarray) -> Iterator[list[tuple]]:
    """Yields per layer a list of attention's inputs and outputs, [B, T, D], of each batch."""

    def observe(attention, h_BTD, positions, mask):
        return h_BTD, attention(h_BTD, positions, **mask)

    yield from LayerwisePass(model, rows_BT).layers(observe)


def _heads(config: TransformerConfig, index: int, weights: dict[Path, np.ndarray], *, length: int):
    """Returns a function from inputs [B, T, D] to the heads' outputs [B, T, X].

    X has all heads' channels, and a constant 1 if attention's output has a bias.
    """
    run = _program(config.block, *config.layers[index], length)
    N, V, _ = weights["out",].shape
    plain = weights | {("out",): np.eye(N * V, dtype=np.float32).reshape(N, V, N * V)}
    if biased := ("out_bias",) in weights:
        plain["out_bias",] = np.zeros(N * V, np.float32)
    plain = jax.tree.map(jnp.asarray, traverse_util.unflatten_dict(plain))

    def outputs(h_BTD):
        o_BTX = np.asarray(run(plain, h_BTD), np.float64)
        return np.concatenate([o_BTX, np.ones_like(o_BTX[..., :1])], axis=-1) if biased else o_BTX

    return outputs


@functools.cache  # layers of equal shape and kind share one program
def _program(
    block: BlockConfig, mechanism: MechanismConfig, kind: LayerKind, length: int
) -> Callable[[dict, jax.Array], jax.Array]:
    """Returns attention's compiled forward pass: (weights, inputs [B, T, D]) to outputs."""
    graph, _ = nnx.split(
        nnx.eval_shape(lambda: Attention(mechanism, block.d_model, rngs=nnx.Rngs(0)))
    )
    token_index = np.arange(length, dtype=np.int32)[None]

    @jax.jit
    def run(weights, h_BTD):
        positions = rope.positions(token_index, mechanism.rope_dim, kind.rope_base)
        return nnx.merge(graph, weights)(h_BTD, positions, causal=block.causal, **kind.attend)

    return run


def _projection(weights: dict[Path, np.ndarray]) -> np.ndarray:
    """Returns [X, D], the output projection with its bias, if any, as a last row."""
    out_XD = weights["out",].reshape(-1, weights["out",].shape[-1]).astype(np.float64)
    bias = weights.get(("out_bias",))
    return out_XD if bias is None else np.concatenate([out_XD, bias[None]])


def _from_projection(w_XD: np.ndarray, like: dict[Path, np.ndarray]) -> dict[Path, np.ndarray]:
    """Inverts `_projection`, with shapes from `like`."""
    shape = like["out",].shape
    weights = {("out",): w_XD[: shape[0] * shape[1]].reshape(shape).astype(np.float32)}
    if ("out_bias",) in like:
        weights["out_bias",] = w_XD[-1].astype(np.float32)
    return weights


def _regressed(rows: list[tuple], before_XD: np.ndarray) -> np.ndarray:
    """Returns the projection [X, D] by ridge regression towards `before_XD`."""
    moment_XX, cross_XD = np.zeros((len(before_XD), len(before_XD))), np.zeros(before_XD.shape)
    for o_TX, y_TD in rows:
        moment_XX += o_TX.T @ o_TX
        cross_XD += o_TX.T @ y_TD
    ridge = _RIDGE * np.trace(moment_XX) / len(moment_XX)
    moment_XX[np.diag_indices_from(moment_XX)] += ridge
    return scipy.linalg.solve(moment_XX, cross_XD + ridge * before_XD, assume_a="pos")


def _lost(rows: list[tuple], w_XD: np.ndarray) -> float:
    """Returns the lost share of the outputs' energy."""
    lost = sum(np.sum((y_TD - o_TX @ w_XD) ** 2) for o_TX, y_TD in rows)
    energy = sum(np.sum(y_TD**2) for _, y_TD in rows)
    return float(lost / energy) if energy else 0.0
