"""Whisper's decoder as a `Model` that the reports of `kvjax.analysis` read layer by layer.

Layers are kvjax's, with cross-attention after self-attention (`CrossBlock`). Cross-attention reads
the encoder's frames for silence, so its keys and values are the same for every text.
"""

from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments.conversion import whisper as whisper_lib
from experiments.conversion.whisper import Whisper
from kvjax.analysis import texts as texts_lib
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert.model import Parameters
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.layers.norm import Norm
from kvjax.layers.weight import weight
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.parameters import Path
from kvjax.model.transformer import Block, Compute

_EPSILON = 1e-5  # of LayerNorm


class Frames(nnx.Module):
    """Unmasked attention to keys and values [S, N, H] that are weights."""

    def __init__(self, mechanism: MechanismConfig, d_model: int, *, rngs: nnx.Rngs):
        sizes = dict(D=d_model, N=mechanism.num_heads, H=mechanism.value_dim)
        self.query = weight("D -> N H", rngs, **sizes)
        self.query_bias = weight("N H", rngs, **sizes)
        # T = 1 is a placeholder: merged weights determine the number of frames.
        self.key, self.value = (weight("T N H", rngs, T=1, **sizes) for _ in range(2))
        self.out = weight("N H -> D", rngs, **sizes)
        self.out_bias = weight("D", rngs, **sizes)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, self.query[...])
        q_BTNH = q_BTNH + self.query_bias[...][None, None]
        z_BNTS = jnp.einsum("BTNH,SNH->BNTS", q_BTNH, self.key[...]) * q_BTNH.shape[-1] ** -0.5
        o_BTNH = jnp.einsum("BNTS,SNH->BTNH", jax.nn.softmax(z_BNTS, axis=-1), self.value[...])
        y_BTD = jnp.einsum("BTNH,NHD->BTD", o_BTNH, self.out[...])
        return y_BTD + self.out_bias[...][None, None]


class CrossBlock(Block):
    """Self-attention, attention to frames, and the MLP."""

    def __init__(self, config: BlockConfig, mechanism: MechanismConfig, *, rngs: nnx.Rngs):
        super().__init__(config, mechanism, rngs=rngs)
        kind = dict(kind=config.norm, gain=config.norm_gain, bias=config.norm_bias)
        self.cross_norm = Norm(config.d_model, **kind, epsilon=config.norm_epsilon, rngs=rngs)
        self.cross = Frames(mechanism, config.d_model, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, positions: rope.Positions, *, compute: Compute, **mask
    ) -> jax.Array:
        attend = mask | dict(query_chunk=compute.query_chunk, implementation=compute.attention)
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, **attend)
        x_BTD = x_BTD + self.cross(self.cross_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class WhisperModel:
    """A `kvjax.convert.model.Model` in memory; see that class for further attributes.

    Attributes:
      block: class of its layers.
    """

    block = CrossBlock
    chat_template = None

    def __init__(self, whisper: Whisper, name: str = "Whisper tiny.en, decoder"):
        c = whisper.config
        self.name, self.whisper = name, whisper
        self.context, self.tokenizer_json = c.max_positions, whisper.tokenizer.to_json()
        self.token_files: dict[str, bytes] = {}
        block = BlockConfig(
            num_layers=c.num_layers,
            d_model=c.d_model,
            mlp_dim=c.mlp_dim,
            norm="layer",
            norm_gain=True,
            norm_bias=True,
            norm_epsilon=_EPSILON,
            embedding_norm=False,
            positions="learned",
            max_positions=c.max_positions,
            activation="gelu_exact",
            bias=True,
            tied_head=True,
            logit_softcap=0.0,
        )
        self.transformer = TransformerConfig(
            block=block, mechanisms=c.mechanisms, vocab_size=c.vocab_size
        )
        self._outer = {name: w for name, w in whisper.params.items() if name != "layers"}
        self._layers = [traverse_util.flatten_dict(layer) for layer in whisper.params["layers"]]

    def parameters(self) -> Parameters:
        """Returns shape and dtype by path; all layers are one group of equal mechanisms."""

        def of(path, w, *front):
            return (path, ((*front, *w.shape), np.dtype(w.dtype)))

        outer = traverse_util.flatten_dict(self._outer).items()
        layers = self._layers[0].items()
        return dict(
            [of(path, w) for path, w in outer]
            + [of(("segments", 0, *path), w, len(self._layers)) for path, w in layers]
        )

    def read(self, path: Path, layer: int | None = None) -> np.ndarray:
        """Returns a parameter in float32, of one layer or of all."""
        if path[0] != "segments":
            return np.asarray(traverse_util.flatten_dict(self._outer)[path])
        of_layers = self._layers if layer is None else [self._layers[layer]]
        stacked = np.stack([np.asarray(flat[path[2:]]) for flat in of_layers])
        return stacked if layer is None else stacked[0]


def passages(whisper: Whisper, length: int, count: int) -> dict[str, np.ndarray]:
    """Returns `count` passages [length] of the held-out part of each embedded book, by name.

    Passages begin with the prefix of a row, and are evenly spaced over the part.

    Raises:
      UserError: a part has fewer tokens.
    """
    by_name = {}
    for name, source in texts_lib.sources(texts_lib.EMBEDDED).items():
        text = "".join(piece.text for piece in source.pieces("validation", 0.0))
        tokens_T, prefix_P = np.array(whisper.encode(text), np.int32), np.array(whisper.prefix)
        width = length - len(prefix_P)
        if len(tokens_T) < count * width:
            raise UserError(
                f"{name} has {len(tokens_T):,} tokens held out, fewer than {count} passages of "
                f"{width:,}: ask for fewer or shorter ones"
            )
        for i in range(1, count + 1):
            first = (i - 1) * (len(tokens_T) - width) // max(count - 1, 1)
            row_T = np.concatenate([prefix_P, tokens_T[first : first + width]])
            by_name[f"{name} {i}" if count > 1 else name] = row_T.astype(np.int32)
    return by_name


def load(folder) -> WhisperModel:
    """Loads the decoder, see `whisper.load`."""
    return WhisperModel(whisper_lib.load(folder))
