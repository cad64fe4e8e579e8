"""Runs a text through a model and returns each layer's queries, keys and values.

Losses can be computed with another function in place of softmax attention. Arrays are float32, as
the model computes them. One layer's weights are in memory at a time.
"""

from collections.abc import Callable, Iterator
import functools
import math
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import Attention
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import layerwise, model as model_lib
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError
from kvjax.kernels.softmax_attention.api import softmax_attention
from kvjax.layers import rope

_QUERY_CHUNK = 64


class Mask(NamedTuple):
    """The keys that a query attends to."""

    causal: bool = True  # only keys up to the query's own position
    window: int = 0  # only this many latest keys, the query's own included; 0: all

    def visible(self, length: int) -> np.ndarray:
        """Returns [L, L] bool: True if a query (row) attends to a key (column)."""
        if not self.causal:
            return np.ones((length, length), bool)
        seen = np.tri(length, dtype=bool)
        return seen & ~np.tri(length, k=-self.window, dtype=bool) if self.window else seen


# A replacement for softmax attention: from queries [B, T, N, H], keys [B, T, K, H], values
# [B, T, K, Hv], the logits' scale, the mask and the logits' soft cap (0: none) it computes the
# heads' outputs [B, T, N, Hv].
Attend = Callable[[jax.Array, jax.Array, jax.Array, float, Mask, float], jax.Array]


class Layer(NamedTuple):
    """A layer's attention on B sequences of T tokens; query head n reads KV head n // (N / K).

    Attributes:
      query_BTNH, key_BTKH, value_BTKH: as attention uses them, normalised and rotated.
      plain_query_BTNH, plain_key_BTKH: the same queries and keys without RoPE.
      input_BTD: inputs of attention, after the layer's norm.
      scale: factor of the logits.
      mask: the layer's mask.
      softcap: c in c·tanh(z/c), applied to scaled logits z; 0: none.
    """

    query_BTNH: np.ndarray
    key_BTKH: np.ndarray
    value_BTKH: np.ndarray
    plain_query_BTNH: np.ndarray
    plain_key_BTKH: np.ndarray
    input_BTD: np.ndarray
    scale: float
    mask: Mask
    softcap: float = 0.0


def layers(model: LazyModel, rows_BT: np.ndarray, attend: Attend | None = None) -> Iterator[Layer]:
    """Yields every layer's attention on rows of tokens.

    Args:
      attend: replacement for softmax attention in all layers; later layers see its outputs.

    Raises:
      UserError: queries, keys or values are not finite. The message names the layer and the heads.
    """
    c, length = model.transformer.block, rows_BT.shape[1]
    run = layerwise.LayerwisePass(model, rows_BT, attention=_attention(attend))
    project = functools.cache(functools.partial(_projections, c.d_model, length))
    inputs = run.layers(lambda attention, h_BTD, positions, mask: h_BTD)
    for i, ((mechanism, kind), h_batches) in enumerate(
        zip(model.transformer.layers, inputs, strict=True)
    ):
        layer_weights = model_lib.read_layer(model, i, "attention")
        weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), layer_weights)
        run_layer = project(mechanism, kind.rope_base)
        batches = [run_layer(weights, h_BTD) for h_BTD in h_batches]
        arrays = map(np.concatenate, zip(*jax.tree.map(np.asarray, batches), strict=True))
        scale = mechanism.scale * kind.logit_factor
        layer = Layer(*arrays, scale, Mask(c.causal, kind.window), kind.softcap)
        _check_finite(layer, f"layer {i} of {model.name}")
        yield layer


def attention(layer: Layer, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns [N, T, T] probabilities and [T, N, Hv] head outputs of one sequence, in float64."""
    N, K = layer.query_BTNH.shape[2], layer.key_BTKH.shape[2]

    def by_head(x_BTNH):
        return x_BTNH[sequence].astype(np.float64).swapaxes(0, 1)

    query_NTH = by_head(layer.query_BTNH) * layer.scale
    key_NTH, value_NTH = (
        np.repeat(by_head(x), N // K, axis=0) for x in (layer.key_BTKH, layer.value_BTKH)
    )
    visible_TT = layer.mask.visible(query_NTH.shape[1])
    p_NTT = softmax(capped(query_NTH @ key_NTH.swapaxes(1, 2), layer.softcap), visible_TT)
    return p_NTT, (p_NTT @ value_NTH).swapaxes(0, 1)


def capped(z_TT: np.ndarray, softcap: float) -> np.ndarray:
    """Returns softcap · tanh(z / softcap), or the logits themselves for 0."""
    return softcap * np.tanh(z_TT / softcap) if softcap else z_TT


def softmax(z_TT: np.ndarray, visible_TT: np.ndarray) -> np.ndarray:
    """Returns [..., T, T] probabilities over the visible keys; overwrites the logits."""
    np.copyto(z_TT, -np.inf, where=~visible_TT)
    z_TT -= z_TT.max(axis=-1, keepdims=True)
    np.exp(z_TT, out=z_TT)
    z_TT /= z_TT.sum(axis=-1, keepdims=True)
    return z_TT


def losses(model: LazyModel, rows_BT: np.ndarray, attend: Attend | None = None) -> np.ndarray:
    """Returns [B, T - 1] losses in nats, of every token except each row's first.

    Args:
      attend: replacement for softmax attention in all layers.

    Raises:
      UserError: losses are not finite.
    """
    run = layerwise.LayerwisePass(model, rows_BT[:, :-1], attention=_attention(attend))
    for _ in run.layers():
        pass
    nats_BT = np.concatenate(list(run.losses(rows_BT[:, 1:])))
    if not np.isfinite(nats_BT).all():
        raise UserError(f"losses of {model.name} on the text are not finite: check its weights")
    return nats_BT


def perplexity(model: LazyModel, rows_BT: np.ndarray, attend: Attend | None = None) -> float:
    """Returns exp of the mean of `losses`."""
    return math.exp(losses(model, rows_BT, attend).mean(dtype=np.float64))


def plain(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    scale: float,
    mask: Mask,
    softcap: float,
) -> jax.Array:
    """Applies softmax attention, as an `Attend`."""
    options = dict(scale=scale, softcap=softcap, **mask._asdict())
    options |= dict(implementation="xla", query_chunk=_QUERY_CHUNK)
    return softmax_attention(q_BTNH, k_BTKH, v_BTKH, **options)


def _attention(attend: Attend | None) -> type[Attention]:
    """Returns an `Attention` class that applies `attend` instead of softmax attention."""
    if attend is None:
        return Attention

    class PatchedAttention(Attention):
        def __call__(
            self, x_BTD, positions, *, causal, window=0, logit_factor=1.0, softcap=0.0, **_
        ):
            q_BTNH, raw = self.mechanism.project(x_BTD, positions)
            k_BTKH, v_BTKH = self.mechanism.keys_values(raw, positions)
            scale = self.mechanism.config.scale * logit_factor
            o_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, scale, Mask(causal, window), softcap)
            return self.project_out(o_BTNH, x_BTD, positions)

    return PatchedAttention


def _projections(
    d_model: int, length: int, mechanism: MechanismConfig, rope_base: rope.Base | None
):
    """Returns a compiled function from attention's weights and input to the arrays of a `Layer`."""
    module = nnx.eval_shape(lambda: Attention(mechanism, d_model, rngs=nnx.Rngs(0)))
    graph, _ = nnx.split(module)
    index = np.arange(length, dtype=np.int32)[None]

    @jax.jit
    def run(weights, h_BTD):
        merged = nnx.merge(graph, weights).mechanism
        positions, no_positions = (
            rope.positions(index, mechanism.rope_dim, base) for base in (rope_base, None)
        )
        q_BTNH, raw = merged.project(h_BTD, positions)
        k_BTKH, v_BTKH = merged.keys_values(raw, positions)
        plain_q_BTNH, raw = merged.project(h_BTD, no_positions)
        plain_k_BTKH, _ = merged.keys_values(raw, no_positions)
        return q_BTNH, k_BTKH, v_BTKH, plain_q_BTNH, plain_k_BTKH, h_BTD

    return run


def _check_finite(layer: Layer, where: str) -> None:
    parts = dict(queries=layer.query_BTNH, keys=layer.key_BTKH, values=layer.value_BTKH)
    for name, x_BTNH in parts.items():
        heads = np.flatnonzero(~np.isfinite(x_BTNH).all(axis=(0, 1, 3))).tolist()
        if heads:
            raise UserError(f"{where}: {name} on the text are not finite, of heads {heads}")
