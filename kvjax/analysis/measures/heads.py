"""Reads a layer's attention as matrices per head, in float64, for any mechanism.

Without norms and RoPE, queries, keys and values are linear in a layer's input. Projecting unit
vectors through the mechanism, with norms reduced to their gains and without positions, therefore
gives their matrices. A new mechanism needs no code here.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.measures import rotary
from kvjax.attention import Attention
from kvjax.attention.mechanism import Mechanism, MechanismConfig
from kvjax.convert import model as model_lib
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.layers.norm import Norm

_TOLERANCE = 1e-9  # relative error of a linear map
_FEW_CHANNELS = 8  # input width D for checks on random weights


@dataclasses.dataclass(frozen=True)
class Heads:
    """Weights of one layer, without biases and output gates.

    Heads are counted by their softmax: each branch of an MLRA head counts as one.

    Attributes:
      out_NHD: output projection, multiplied by the mechanism's `combine` if it has one.
      rotated: the 2·F channels of queries and keys that RoPE rotates; channels i and i + F of them
        are a pair. An empty slice without RoPE.
      frequencies_F: radians per token of each pair.
    """

    query_DNH: np.ndarray
    key_DKH: np.ndarray
    value_DKH: np.ndarray
    out_NHD: np.ndarray
    rotated: slice
    frequencies_F: np.ndarray

    @property
    def num_heads(self) -> int:
        return self.query_DNH.shape[1]


def layers(model: LazyModel) -> Iterator[Heads]:
    """Yields the heads of every layer, with one layer's weights in memory.

    Raises:
      UserError: queries, keys or values are not linear, even without norms and RoPE.
    """
    for index in range(len(model.transformer.mechanisms)):
        yield of_layer(model, index)


def of_layer(model: LazyModel, index: int) -> Heads:
    """Returns the heads of one layer; see `layers`."""
    config, kind = model.transformer.layers[index]
    weights = model_lib.read_layer(model, index, "attention")
    with _naming_layer(model, index):
        return read(weights, config, model.transformer.block.d_model, kind.rope_base)


def check(model: LazyModel, indices: Iterable[int] | None = None) -> None:
    """Raises the UserError that `layers` would raise, by trying small random weights.

    Args:
      indices: layers to check; None: all.
    """
    layers = [(mechanism, kind.rope_base) for mechanism, kind in model.transformer.layers]
    indices = range(len(layers)) if indices is None else indices
    first = {layers[index]: index for index in reversed(list(indices))}
    rng = np.random.default_rng(0)
    for (config, rope_base), index in first.items():
        state = nnx.split(_shape(config, _FEW_CHANNELS))[1]
        weights = jax.tree.map(lambda w: rng.normal(size=w.shape), nnx.to_pure_dict(state))
        with _naming_layer(model, index):
            read(weights, config, _FEW_CHANNELS, rope_base)


@contextlib.contextmanager
def _naming_layer(model: LazyModel, index: int) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"layer {index} of {model.name}: {error}") from error


def read(
    weights: dict, config: MechanismConfig, d_model: int, rope_base: rope.Base | None
) -> Heads:
    """Returns the heads of an `Attention`'s weights, given as a pure dict of one layer.

    Args:
      rope_base: base of the layer's RoPE; None: no RoPE.
    """
    with jax.enable_x64(True):
        mechanism = _without_norms(_merged(weights, config, d_model))

        def project(x_TD, position=None):
            return _projected(mechanism, x_TD, position, rope_base)

        biases = project(np.zeros((1, d_model)))
        matrices = [x - b for x, b in zip(project(np.eye(d_model)), biases, strict=True)]
        x_TD = np.random.default_rng(0).normal(size=(3, d_model))
        _check_linear(matrices, [x - b for x, b in zip(project(x_TD), biases, strict=True)], x_TD)
        rotated, frequencies_F = _rotation(project, x_TD, config, rope_base)
        out_NHD = _outputs(mechanism, np.asarray(weights["out"], np.float64))
    query_DNH, key_DKH, value_DKH = matrices
    return Heads(query_DNH, key_DKH, value_DKH, out_NHD, rotated, frequencies_F)


def _merged(weights: dict, config: MechanismConfig, d_model: int) -> nnx.Module:
    """Returns the mechanism with these weights in float64."""
    graph, _ = nnx.split(_shape(config, d_model))
    float64_weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), weights)
    return nnx.merge(graph, float64_weights).mechanism


def _shape(config: MechanismConfig, d_model: int) -> Attention:
    """Returns an abstract `Attention`."""
    return nnx.eval_shape(lambda: Attention(config, d_model, rngs=nnx.Rngs(0)))


class _Gain(nnx.Module):
    """A norm reduced to its gain."""

    def __init__(self, norm: Norm):
        self.gain, self.offset = norm.gain, norm.offset

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gain is None:
            return x
        gain = self.gain[...] + (1 if self.offset else 0)
        return x * jnp.expand_dims(gain, range(x.ndim - gain.ndim))


def _without_norms(mechanism: Mechanism) -> Mechanism:
    for name, norm in list(vars(mechanism).items()):
        if isinstance(norm, Norm):
            # Query or key norms without a gain become None, as in a mechanism without QK-norm.
            removed = norm.gain is None and name.endswith(("query_norm", "key_norm"))
            setattr(mechanism, name, None if removed else _Gain(norm))
    return mechanism


def _projected(
    mechanism: nnx.Module, x_TD: np.ndarray, position: int | None, rope_base: rope.Base | None
) -> list[np.ndarray]:
    """Returns [T, N or K, H] queries, keys and values, all at `position`; None: no positions."""
    index = np.full((1, len(x_TD)), position or 0, np.int32)
    base = None if position is None else rope_base
    positions = rope.positions(index, mechanism.config.rope_dim, base)
    q_1TNH, raw = mechanism.project(jnp.asarray(x_TD)[None], positions)
    return [np.asarray(x[0]) for x in (q_1TNH, *mechanism.keys_values(raw, positions))]


def _outputs(mechanism: Mechanism, out_NHD: np.ndarray) -> np.ndarray:
    """Returns the matrices from each query head's output to the layer's output; see `Heads`."""
    if type(mechanism).combine is Mechanism.combine:
        return out_NHD
    heads, channels = mechanism.config.query_heads, mechanism.config.value_dim
    matrices_NHD = np.empty((heads, channels, out_NHD.shape[-1]))
    for head in range(heads):  # all heads at once take gigabytes in a large model
        units_1TNH = jnp.zeros((1, channels, heads, channels)).at[0, :, head].set(jnp.eye(channels))
        o_TNH = np.asarray(mechanism.combine(units_1TNH, rope.Positions(None, None))[0])
        matrices_NHD[head] = np.einsum("TNH,NHD->TD", o_TNH, out_NHD)
    return matrices_NHD


def _check_linear(
    matrices: list[np.ndarray], projections: list[np.ndarray], x_TD: np.ndarray
) -> None:
    for name, w_DNH, y_TNH in zip(
        ("queries", "keys", "values"), matrices, projections, strict=True
    ):
        expected_TNH = np.tensordot(x_TD, w_DNH, 1)
        if not np.isfinite(expected_TNH).all():
            heads = np.flatnonzero(~np.isfinite(w_DNH).all(axis=(0, 2))).tolist()
            raise UserError(f"weights of {name} are not finite, of heads {heads}")
        if np.abs(y_TNH - expected_TNH).max() > _TOLERANCE * np.abs(expected_TNH).max():
            raise UserError(
                f"{name} are not linear in the layer's input, even without norms and RoPE: heads "
                "have no matrices to compare (as with TPA, or qk_norm 'rms_gain' with rope "
                "'shared')"
            )


def _rotation(project, x_TD: np.ndarray, config: MechanismConfig, rope_base: rope.Base | None):
    """Returns the channels that RoPE rotates, checked on queries, and their frequencies."""
    if rope_base is None:
        return slice(0, 0), np.zeros(0)
    at_0_TNH, at_1_TNH = project(x_TD)[0], project(x_TD, 1)[0]
    frequencies_F, rotated = rope.frequencies(config.rope_dim, rope_base), config.rotated_channels
    expected_TNH = rotate_one_token(at_0_TNH, rotated, frequencies_F)
    if np.abs(expected_TNH - at_1_TNH).max() > _TOLERANCE * np.abs(at_0_TNH).max():
        raise UserError("the channels of RoPE's pairs are not half of the rotated channels apart")
    return rotated, frequencies_F


def rotate_one_token(x_TNH: np.ndarray, rotated: slice, frequencies_F: np.ndarray) -> np.ndarray:
    """Rotates queries or keys by one token."""
    return rotary.rotate_pairs(x_TNH, rotated, np.exp(1j * frequencies_F))
