"""Changes of basis of attention's weights, after which a quantised cache loses less.

A cache stores vectors in some basis, and outputs do not depend on which. In the basis chosen here
every cached channel counts equally, and no channel holds outliers:

- Latents r = x U that B expands: only U B counts. With B = L Q, where Q has orthonormal rows,
  U becomes U L and B becomes Q. An error of the latent is then one of as large a key or value.
- Latents that are normed, and values: multiplied by an orthogonal matrix, which the next weight
  undoes. A norm's gain goes into the next weight first. Values are left as they are under
  `output_gate`, whose gates belong to channels.
- Both: times a Hadamard matrix (or Hartley's, where the number of channels is no power of two) with
  random signs, which spreads a large channel over all others.
- Keys under RoPE are multiplied when they are cached, and their queries likewise (`spread_keys`).

Keys that are values (Q-K=V, MFA-KR), and GTA and shared KV with gains, have no other basis.
All this is exact: in float64 outputs are equal to 1e-10 (tests/attention/test_canonical.py).
"""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from kvjax.attention.factored import FactoredConfig
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.gta import GTAConfig
from kvjax.attention.mechanism import MechanismConfig
from kvjax.attention.mla import MLAConfig
from kvjax.attention.mla_lrkv import MLALRKVConfig
from kvjax.attention.mla_paper import PaperMLAConfig
from kvjax.attention.shared_kv import SharedKVConfig
from kvjax.attention.tpa import TPAConfig
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs, ResidualInputs

Weights = dict[str, np.ndarray]  # of one `Attention`, float64, by path: "out", "mechanism/query"
_M = "mechanism/"


def change_basis(config: MechanismConfig, weights: Weights, where: str = "a layer") -> Weights:
    """Returns those weights of one layer that change, in float64.

    Args:
      weights: all weights of an `Attention`.
      where: name of the layer in a message.

    Raises:
      UserError: a weight that is NaN or infinite.
    """
    for path, w in weights.items():
        if not np.isfinite(w).all():
            raise UserError(
                f"{where}: the weight {path} has NaN or infinite numbers: load another checkpoint"
            )
    layer = _Layer(weights)
    match config:
        case GroupedConfig():
            kinds = ("key",) if config.ties_values else ("key", "value")
            for kind in kinds if config.rank else ():
                layer.balance(f"latent_{kind}", [f"expand_{kind}"])
            if not config.ties_values:
                layer.rotate_values(config, "base_value", "expand_value")
        case FactoredConfig():
            for kind, rank in (("key", config.key_rank), ("value", config.value_rank)):
                if rank:
                    layer.balance(kind, [f"expand_{kind}"])
            if not config.value_rank:
                layer.rotate_values(config, "value")
        case MLAConfig():
            if config.norm_latent:
                layer.rotate_latent()
            else:
                layer.balance("down", ["up_key", "up_value"])
            if isinstance(config, MLALRKVConfig) and config.rank:
                for kind in ("key", "value"):
                    layer.balance(f"latent_{kind}", [f"expand_{kind}"])
        case PaperMLAConfig():
            layer.balance("down", ["up_key", "up_value"])
        case TPAConfig():
            layer.rotate_values(config, "value_factor")
        case GTAConfig() | SharedKVConfig():
            layer.rotate_parts(config)
    return layer.changed


def spread_field(config: MechanismConfig) -> str:
    """Returns the cached keys that `spread_keys` multiplies; "" if there are none."""
    name = ""
    if isinstance(config, GroupedConfig) and not config.ties_values:
        name = "base_key"
    if isinstance(config, FactoredConfig) and not config.key_rank:
        name = "key"
    if isinstance(config, TPAConfig):
        name = "key_factor"
    return name if config.key_dim.bit_count() == 1 else ""


def spread_keys(
    config: MechanismConfig, entry: Mapping[str, jax.Array], inputs: DecodeInputs
) -> tuple[dict[str, jax.Array], DecodeInputs]:
    """Multiplies new cached keys, and the queries of all keys, by a Hadamard matrix.

    Its elements are 1 and -1, which every dtype has exactly; keys become sqrt(H) times as large,
    queries as much smaller.
    """
    name, entry = spread_field(config), dict(entry)
    if not name:
        return entry, inputs
    signs_HH = np.rint(spread_matrix(config.key_dim) * config.key_dim**0.5)

    def spread(x):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        product = functools.partial(jnp.einsum, "...H,HI->...I", preferred_element_type=wide)
        return product(x, jnp.asarray(signs_HH, x.dtype), precision="highest")

    entry[name] = spread(entry[name])
    query = (spread(inputs.query) / config.key_dim).astype(inputs.query.dtype)
    changes = dict(query=query)
    if isinstance(inputs, ResidualInputs):
        changes |= dict(separate_queries=True)
    return entry, dataclasses.replace(inputs, **changes)


class _Layer:
    """One layer's weights, as they change; `changed` has those that did."""

    def __init__(self, weights: Weights):
        self._weights, self.changed = weights, {}

    def _get(self, path: str) -> np.ndarray | None:
        return self.changed.get(path, self._weights.get(path))

    def _multiply(self, name: str, w: np.ndarray) -> None:
        """Multiplies the last axis of a mechanism's weight and its bias by `w`, [.., C, C]."""
        for path in (_M + name, f"{_M}{name}_bias"):
            if (x := self._get(path)) is not None:
                self.changed[path] = (x[..., None, :] @ w)[..., 0, :]

    def balance(self, latent: str, expand: list[str]) -> None:
        """Makes the rows of what expands a latent orthonormal, and its channels alike.

        Latents J (or G J) are the axes of `latent` between D and its channels. A weight in `expand`
        is [.., C, heads, H] with the same axes in front, or [K, C, H] with K a multiple of J.
        """
        weight = self._get(_M + latent)
        latents, channels = weight.shape[1:-1], weight.shape[-1]
        count = int(np.prod(latents))
        views = {}
        for name in expand:
            w = self._get(_M + name)
            if len(w.shape) == 3 and latents:  # [K, C, H] -> [J, C, K/J, H]
                K, C, H = w.shape
                views[name] = w.reshape(count, K // count, C, H).swapaxes(1, 2)
            else:
                views[name] = w.reshape(count, channels, *w.shape[-2:])
        flat = [v.reshape(count, channels, -1) for v in views.values()]
        left, right = zip(*map(_balanced, np.concatenate(flat, axis=-1)), strict=True)
        self._multiply(latent, np.stack(left).reshape(*latents, channels, channels))
        parts = np.split(np.stack(right), np.cumsum([f.shape[-1] for f in flat])[:-1], axis=-1)
        for (name, view), part in zip(views.items(), parts, strict=True):
            part, shape = part.reshape(view.shape), self._get(_M + name).shape
            if len(shape) == 3 and latents:
                part = part.swapaxes(1, 2)
            self.changed[_M + name] = part.reshape(shape)

    def rotate_latent(self) -> None:
        """Multiplies MLA's normed latents by an orthogonal matrix."""
        gain, matrix = (
            self._get(_M + "latent_norm/gain"),
            spread_matrix(self._get(_M + "down").shape[-1]),
        )
        for name in ("up_key", "up_value"):
            up = self._get(_M + name)
            if gain is not None:
                up = up * gain[..., None, None]
            self.changed[_M + name] = np.einsum("cC,...cnH->...CnH", matrix, up)
        if gain is not None:
            self.changed[_M + "latent_norm/gain"] = np.ones_like(gain)
        self._multiply("down", matrix)

    def rotate_values(self, config: MechanismConfig, *names: str) -> None:
        """Multiplies values by an orthogonal matrix, which the output projection undoes."""
        if not config.output_gate:
            matrix = spread_matrix(config.value_dim)
            for name in names:
                if self._get(_M + name) is not None:
                    self._multiply(name, matrix)
            self._rotate_out(matrix)

    def rotate_parts(self, config: GTAConfig | SharedKVConfig) -> None:
        """Multiplies the unrotated channels of keys that are values, where nothing is per channel.

        GTA's last P channels are values alone.
        """
        if config.output_gate or config.qk_norm == "rms_gain":
            return
        key, P = config.key_dim, config.rope_key_dim
        first = spread_matrix(key - P) if P < key else np.zeros((0, 0))
        matrix = scipy.linalg.block_diag(first, np.eye(P))
        self._multiply("query", matrix)
        if isinstance(config, GTAConfig) and P:
            matrix = scipy.linalg.block_diag(first, spread_matrix(P))
        self._multiply("latent", matrix)
        self._rotate_out(matrix)

    def _rotate_out(self, matrix: np.ndarray) -> None:
        self.changed["out"] = np.einsum("NHD,HI->NID", self._get("out"), matrix)


def _balanced(expand_CM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors [C, M] into L [C, C] and Q [C, M] with orthonormal rows, if M has room for them."""
    C, M = expand_CM.shape
    matrix = spread_matrix(C)
    if C > M:
        return matrix, matrix.T @ expand_CM
    left, sizes, right = np.linalg.svd(expand_CM, full_matrices=False)
    return left * sizes @ matrix, matrix.T @ right


@functools.cache
def spread_matrix(n: int) -> np.ndarray:
    """Returns an orthogonal matrix [n, n] whose elements are all small, with random signs."""
    if n.bit_count() == 1:
        matrix = scipy.linalg.hadamard(n) / n**0.5
    else:
        angles = 2 * np.pi / n * np.outer(np.arange(n), np.arange(n))
        matrix = (np.cos(angles) + np.sin(angles)) / n**0.5
    return np.random.default_rng(n).choice((-1.0, 1.0), n)[:, None] * matrix
