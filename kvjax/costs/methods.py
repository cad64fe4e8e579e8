"""Computes the KV cache that a published model would have with another attention mechanism.

There is one row per mechanism, which replaces the attention of all layers. Layers keep their
windows. Bytes are those of kvjax's cache entries (`formulas.entry_bytes`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
import dataclasses
import math

import jax.numpy as jnp

from kvjax.attention import named
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.mechanism import MechanismConfig
from kvjax.attention.mla import MLAConfig
from kvjax.cache import quantized
from kvjax.costs import formulas
from kvjax.costs.shape import Layer, Shape
from kvjax.foundation.errors import UserError
from kvjax.hardware.datasheets import Device

TRANSMLA = ((512, 64), (256, 64))  # latent and RoPE key of TransMLA's conversions (2502.07864)
# MHA2MLA's conversions (2502.14837) have, per KV head, H/2, H/4 or H/8 channels in the latent and
# H/8 in the RoPE key.
MHA2MLA, MHA2MLA_ROPE = (2, 4, 8), 8
_BFLOAT16 = jnp.dtype(jnp.bfloat16)

# Returns the mechanism that replaces a layer's attention; None if the layer's sizes rule it out.
Make = Callable[[Layer], MechanismConfig | None]


@dataclasses.dataclass(frozen=True)
class Row:
    """One mechanism in every layer.

    Attributes:
      layers: ((mechanism, window), number of layers that have both); window 0: none.
      indexers: (elements per token, window) of each layer's indexer, which caches them beside the
        entry.
      own: True for the published model's own mechanism.
    """

    name: str
    layers: tuple[tuple[tuple[MechanismConfig, int], int], ...]
    indexers: tuple[tuple[int, int], ...] = ()
    own: bool = False

    def cache_bytes(self, dtype: jnp.dtype, tokens: int = 1, bits: int | None = None) -> int:
        """Returns the cache bytes of a sequence of `tokens`.

        Args:
          bits: bits per element of a quantised cache; None: not quantised. Indexers never are.
        """
        total = 0
        for (mechanism, window), count in self.layers:
            cached, entry = min(tokens, window or tokens), quantized.entry_of(mechanism, bits)
            total += count * cached * formulas.entry_bytes(entry, dtype)
        for elements, window in self.indexers:
            total += min(tokens, window or tokens) * elements * dtype.itemsize
        return total

    def tokens(self, context: int, dtype: jnp.dtype, size: int, bits: int | None = None) -> int:
        """Returns how many tokens fit into `size` bytes, in sequences of `context` tokens."""
        return max(0, size * context // self.cache_bytes(dtype, context, bits))


def free_bytes(device: Device, chips: int, weight_bytes: int) -> int:
    """Returns the memory of chips that is left for caches beside the weights and RESERVE."""
    return math.floor((1 - formulas.RESERVE) * device.hbm_bytes) * chips - weight_bytes


def rows(shape: Shape) -> list[Row]:
    """Returns rows for MHA, the model's own mechanism, and every other one that its sizes allow.

    Mechanisms with a larger cache than MHA's are left out, except for the model's own.
    """
    result = []
    for name, make, own in _methods(shape):
        try:
            mechanisms = [make(layer) for layer in shape.layers]
        except UserError:  # sizes that the mechanism cannot have
            continue
        if None in mechanisms:
            continue
        counts = Counter(zip(mechanisms, (layer.window for layer in shape.layers), strict=True))
        indexers = tuple((x.indexer, x.window) for x in shape.layers if own and x.indexer)
        row = Row(name, tuple(counts.items()), indexers, own)
        if not result or own or row.cache_bytes(_BFLOAT16) <= result[0].cache_bytes(_BFLOAT16):
            result.append(row)
    return result


def _methods(shape: Shape) -> Iterator[tuple[str, Make, bool]]:
    """Yields (name with the first layer's sizes, `Make`, True for the model's own mechanism)."""
    first = shape.layers[0]
    K, H, N = first.kv_heads, first.key_dim, first.num_heads
    norm = "rms_gain" if shape.normed_keys else "none"

    def grouped(heads: int | None = None, *, bases=None, rank=1.0, key=1.0, tie="none") -> Make:
        """Makes GQA, MQA, LRKV, thin keys or Q-K=V.

        Args:
          heads: KV heads; 0: N; None: the layer's own K.
          bases: bases of LRKV; None: no residuals.
          rank, key: rank of the residuals and channels of a key, over the layer's H.
        """

        def make(layer: Layer) -> MechanismConfig:
            kv_heads = layer.kv_heads if heads is None else heads or layer.num_heads
            return GroupedConfig(
                num_heads=layer.num_heads,
                num_kv_heads=kv_heads,
                num_bases=bases or kv_heads,
                rank=int(layer.key_dim * rank) if bases else 0,
                key_dim=int(layer.key_dim * key),
                value_dim=layer.value_dim,
                qk_norm=norm,
                tie=tie,
            )

        return make

    def factored(share: float, *, joint: bool, values: bool) -> Make:
        def make(layer: Layer) -> MechanismConfig:
            heads = layer.kv_heads if joint else 1
            config = named.factored(
                layer.num_heads,
                kv_heads=layer.kv_heads,
                latents=1 if joint else layer.kv_heads,
                key_rank=int(heads * layer.key_dim * share),
                value_rank=int(heads * layer.value_dim * share) if values else 0,
            )
            sizes = dict(key_dim=layer.key_dim, value_dim=layer.value_dim, qk_norm=norm)
            return dataclasses.replace(config, **sizes)

        return make

    def mla(latent: Callable[[Layer], int], rope: Callable[[Layer], int]) -> Make:
        def make(layer: Layer) -> MechanismConfig | None:
            if not latent(layer) or not rope(layer):
                return None
            return MLAConfig(
                num_heads=layer.num_heads,
                latent_dim=latent(layer),
                rope_key_dim=rope(layer),
                key_dim=layer.key_dim,
                value_dim=layer.value_dim,
                qk_norm=norm,
            )

        return make

    is_mla, own = bool(first.latent), " (this model)"
    is_mha = not is_mla and all(x.kv_heads == x.num_heads for x in shape.layers)
    yield "MHA" + own * is_mha, grouped(0), is_mha
    if is_mla:
        name = f"MLA, latent {first.latent}, RoPE key {first.rope_key}{own}"
        yield name, mla(lambda x: x.latent, lambda x: x.rope_key), True
    elif not is_mha:
        yield f"{'MQA' if K == 1 else f'GQA, {K} KV heads'}{own}", grouped(), True
    else:
        yield f"GQA, {N // 4} KV heads", grouped(N // 4 if N % 4 == 0 and N > 4 else -1), False
    if K > 1:
        yield "MQA", grouped(1), False
    for divisor in (2, 4, 8):
        yield f"LRKV, rank {H // divisor}", grouped(0, bases=1, rank=1 / divisor), False
    if 1 < K < N:
        for divisor in (2, 4, 8):
            name = f"LRKV, {K} KV heads, rank {H // divisor}"
            yield name, grouped(bases=1, rank=1 / divisor), False
    for divisor in (2, 4):
        yield f"thin keys, {H // divisor} of {H} channels", grouped(key=1 / divisor), False
    yield (
        f"factored keys, rank {H // 4} per head",
        factored(1 / 4, joint=False, values=False),
        False,
    )
    for divisor in (2, 4):
        name = f"factored keys and values, ranks {K * H // divisor}"
        yield name, factored(1 / divisor, joint=True, values=True), False
    yield f"Q-K=V{f', {K} KV heads' if 1 < K < N else ''}", grouped(tie="kv"), False
    if K > 1:
        yield "Q-K=V, MQA", grouped(1, tie="kv"), False
    if not is_mla:
        for latent, rope in TRANSMLA:
            make = mla(lambda x, latent=latent: latent, lambda x, rope=rope: rope)
            yield f"MLA, {latent} + {rope} (TransMLA)", make, False
        for divisor in MHA2MLA:
            latent, rope = K * (H // divisor), K * (H // MHA2MLA_ROPE)
            make = mla(
                lambda x, divisor=divisor: x.kv_heads * (x.key_dim // divisor),
                lambda x: x.kv_heads * (x.key_dim // MHA2MLA_ROPE),
            )
            yield f"MLA, {latent} + {rope} (MHA2MLA)", make, False
