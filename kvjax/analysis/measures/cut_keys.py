"""Runs a model with low-rank keys in all layers.

Several variants run side by side, layer by layer, so that each layer's weights are read once.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.measures import activations
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.measures.key_subspaces import Subspaces
from kvjax.attention import Attention
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import layerwise, model as model_lib
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel
from kvjax.layers import rope
from kvjax.model.layer_kinds import LayerKind
from kvjax.model.transformer import Compute

_COMPUTE = Compute()


class Cut(NamedTuple):
    """Projection of a layer's keys to low rank.

    Attributes:
      subspaces: a subspace for each row of tokens.
      after_rope: True to project keys after RoPE, False before.
    """

    subspaces: Sequence[Subspaces]
    rank: int
    after_rope: bool


class Runs:
    """Forward passes of variants of a model on the same rows of tokens."""

    def __init__(self, model: LazyModel, rows_BT: np.ndarray, names: Sequence[str | tuple | None]):
        """Starts a forward pass for each name of a variant."""
        self._model = model
        self._pass = layerwise.LayerwisePass(model, rows_BT)
        self._x = {name: list(self._pass.x) for name in names}
        self._program = functools.cache(functools.partial(_program, model, rows_BT.shape[1]))

    def layer(self, index: int, cuts: Mapping[str | tuple, Cut], rotated: slice) -> None:
        """Runs every variant through one layer.

        Args:
          cuts: by name of a variant, the cut of its keys; keys of other variants are not changed.
          rotated: channels that RoPE rotates.
        """
        mechanism, kind = self._model.transformer.layers[index]
        weights = jax.tree.map(
            lambda w: jnp.asarray(w, jnp.float32), model_lib.read_layer(self._model, index)
        )
        for name, batches in self._x.items():
            cut = cuts.get(name)
            program = self._program(
                mechanism, kind, (rotated.start, rotated.stop), cut is not None and cut.after_rope
            )
            arrays, start = cut and _arrays(cut), 0
            for i, x_BTD in enumerate(batches):
                rows = slice(start, start + len(x_BTD))
                batch_cut = arrays and tuple(x_BJC[rows] for x_BJC in arrays)
                batches[i] = program(weights, x_BTD, batch_cut)
                start = rows.stop

    def losses(self, targets_BT: np.ndarray) -> dict[str | tuple | None, np.ndarray]:
        """Returns by name [B, t] losses in nats, after the last layer.

        Args:
          targets_BT: [B, t] targets of each row's last t tokens.
        """
        last = [
            x_BTD[:, -targets_BT.shape[1] :] for batches in self._x.values() for x_BTD in batches
        ]
        self._pass.x = layerwise.row_batches(np.concatenate(last))
        batch_losses = self._pass.losses(np.concatenate([targets_BT] * len(self._x)))
        nats = np.split(np.concatenate(list(batch_losses)), len(self._x))
        return dict(zip(self._x, nats, strict=True))


def _arrays(cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    """Returns centers [B, J, C] and projectors [B, J, C, C] of all rows, in float32.

    Projectors of a subspace that several rows share are computed once.
    """
    unique = {id(subspaces): subspaces for subspaces in cut.subspaces}
    with few_threads(cut.subspaces[0].center_JC.shape[1]):
        projectors = {key: subspaces.projectors(cut.rank) for key, subspaces in unique.items()}

    def stacked(arrays):
        return np.stack([x.astype(np.float32) for x in arrays])

    centers = stacked(subspaces.center_JC for subspaces in cut.subspaces)
    return centers, stacked(projectors[id(subspaces)] for subspaces in cut.subspaces)


def _program(
    model: LazyModel,
    length: int,
    mechanism: MechanismConfig,
    kind: LayerKind,
    rotated: tuple,
    after_rope: bool,
):
    """Returns a block's compiled forward pass, a function (weights, x, cut) -> x."""
    block = model.transformer.block
    index = np.arange(length, dtype=np.int32)[None]
    positions, no_positions = (
        rope.positions(index, mechanism.rope_dim, base) for base in (kind.rope_base, None)
    )

    @jax.jit
    def run(weights, x_BTD, cut):
        class Cutting(Attention):
            def __call__(self, h_BTD, positions, *, causal, **_):
                q_BTNH, raw = self.mechanism.project(h_BTD, positions)
                _, v_BTKH = self.mechanism.keys_values(raw, positions)
                _, raw = self.mechanism.project(h_BTD, no_positions)
                k_BTKH, _ = self.mechanism.keys_values(raw, no_positions)
                k_BTKH = k_BTKH if cut is None or after_rope else _cut(k_BTKH, *cut)
                k_BTKH = _rotate(k_BTKH, rotated, positions.rotary)
                k_BTKH = _cut(k_BTKH, *cut) if cut is not None and after_rope else k_BTKH
                scale, mask = mechanism.scale * kind.logit_factor, Mask(causal, kind.window)
                o_BTNH = activations.plain(q_BTNH, k_BTKH, v_BTKH, scale, mask, kind.softcap)
                return self.project_out(o_BTNH, h_BTD, positions)

        def make_block():
            module = layerwise.block_class(model)(block, mechanism, rngs=nnx.Rngs(0))
            module.attention = Cutting(mechanism, block.d_model, rngs=nnx.Rngs(0))
            return module

        graph, _ = nnx.split(nnx.eval_shape(make_block))
        return nnx.merge(graph, weights)(x_BTD, positions, causal=block.causal, compute=_COMPUTE)

    return run


def _rotate(k_BTKH: jax.Array, rotated: tuple[int, int], rotary: rope.Rotary | None) -> jax.Array:
    """Applies RoPE to keys, in the channels from rotated[0] to rotated[1] - 1."""
    channels = slice(*rotated)
    if rotary is None or rotated[0] == rotated[1]:
        return k_BTKH
    return k_BTKH.at[..., channels].set(rope.rotate(k_BTKH[..., channels], rotary))


def _cut(k_BTKH: jax.Array, center_BJC: jax.Array, projector_BJCC: jax.Array) -> jax.Array:
    """Does what `Subspaces.cut` does, for a batch of rows."""
    B, T = k_BTKH.shape[:2]
    center_B1JC = center_BJC[:, None]
    k_BTJC = k_BTKH.reshape(B, T, center_BJC.shape[1], -1) - center_B1JC
    cut_BTJC = jnp.einsum("BTJC,BJCI->BTJI", k_BTJC, projector_BJCC) + center_B1JC
    return cut_BTJC.reshape(k_BTKH.shape)
