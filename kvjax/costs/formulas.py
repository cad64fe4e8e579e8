"""Formulas for a model's parameters, cache bytes, FLOPs and decoding time, given its shapes.

Bytes are logical: array sizes without tiling, padding and copies.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax.cache import quantized
from kvjax.cache.field import Field
from kvjax.hardware.datasheets import Device
from kvjax.layers.weight import Axes
from kvjax.model import parameters as parameter_lib
from kvjax.model.config import TransformerConfig

COMPONENTS = ("embedding", "attention", "mlp", "norm", "head")
# Share of a device's memory left for activations, temporaries and the runtime: vLLM's default.
RESERVE = 0.1


def parameters(config: TransformerConfig) -> dict[str, int]:
    """Counts parameters per component, and in "total"."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_lib.abstract(config).shapes):
        counts[_component(tuple(entry.key for entry in path))] += math.prod(leaf.shape)
    return counts | {"total": sum(counts.values())}


def _component(keys: tuple) -> str:
    if keys[0] in ("embedding", "positions"):
        return "embedding"
    if keys[0] == "head":
        return "head"
    return next((name for name in ("attention", "mlp") if name in keys), "norm")


def cache_bytes_per_token(
    config: TransformerConfig, dtype: jnp.dtype, bits: int | None = None
) -> int:
    """Returns the bytes that the KV cache stores per token in all layers.

    For LRKV this is eq. 5, plus 4 bytes per KV head for 1/rms if keys are normed.

    Args:
      bits: bits per element of a quantised cache (`kvjax.cache.quantized`); None: not quantised.
        Bytes of its scales are counted.
    """
    return sum(
        entry_bytes(quantized.entry_of(mechanism, bits), dtype) for mechanism in config.mechanisms
    )


def entry_bytes(entry: dict[str, Field], dtype: jnp.dtype) -> int:
    """Returns the bytes of one token's entry in one layer."""
    sizes = (math.prod(f.shape) * f.dtype_in(dtype).itemsize for f in entry.values())
    return sum(sizes)


def chip_cache_bytes(
    config: TransformerConfig,
    dtype: jnp.dtype,
    bits: int | None = None,
    *,
    chips: int,
    by: str,
    length: int = 1,
) -> float:
    """Returns the cache bytes that a step reads on the chip that stores the most.

    Args:
      length: tokens of the sequence; layers with a window read the window. 1: bytes per token.
      by: "tokens": every chip stores an equal share of the tokens. "heads": query heads are
        sharded, and a chip stores the KV heads, bases and latents that its query heads read. An
        array that all heads read (an LRKV base, an MLA latent) is replicated.
    """
    keys_by_layer = [min(length, kind.window or length) for _, kind in config.layers]
    if by == "tokens":
        entries = [entry_bytes(quantized.entry_of(m, bits), dtype) for m in config.mechanisms]
        return sum(n * size for n, size in zip(keys_by_layer, entries, strict=True)) / chips
    if by != "heads":
        raise ValueError(f"by = {by!r}: must be 'tokens' or 'heads'")
    chips = min(chips, max(m.num_heads for m in config.mechanisms))  # further chips have no heads
    return max(
        sum(
            n * _bytes_on_chip(m, dtype, bits, chip, chips)
            for m, n in zip(config.mechanisms, keys_by_layer, strict=True)
        )
        for chip in range(chips)
    )


def _bytes_on_chip(mechanism, dtype: jnp.dtype, bits: int | None, chip: int, chips: int) -> int:
    """Returns the bytes of a token's entry in one layer that a chip's heads read."""
    first, end = (i * mechanism.num_heads // chips for i in (chip, chip + 1))
    if first == end:
        return 0
    total = 0
    for field in quantized.entry_of(mechanism, bits).values():
        elements, heads = math.prod(field.shape), field.heads
        if heads is not None:  # query head n reads index n·heads // N
            first_read = first * heads // mechanism.num_heads
            last_read = (end - 1) * heads // mechanism.num_heads
            elements = elements // heads * (last_read - first_read + 1)
        total += elements * field.dtype_in(dtype).itemsize
    return total


def matrix_weights(config: TransformerConfig, *, decoding: bool = False) -> dict[str, int]:
    """Counts weights of matrix products per component: no embedding tables, gains or biases.

    A tied head is counted, because its product with the embedding is computed.

    Args:
      decoding: exclude weights that decoding absorbs into queries and outputs.
    """
    counts = dict.fromkeys(COMPONENTS, 0)
    shapes, axes = parameter_lib.abstract(config)
    absorbed = [mechanism.absorbed if decoding else () for mechanism, _ in config.layer_groups]
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), text in zip(leaves, jax.tree.leaves(axes), strict=True):
        keys = tuple(entry.key for entry in path)
        is_absorbed = "mechanism" in keys and keys[-1] in absorbed[keys[1]]
        if Axes.parse(text).is_matrix and not is_absorbed:
            counts[_component(keys)] += math.prod(leaf.shape)
    if config.block.tied_head:
        counts["head"] = config.vocab_size * config.block.d_model
    return counts


def training_flops_per_token(config: TransformerConfig, sequence_length: int) -> int:
    """Returns FLOPs per token of forward and backward pass, 2 per multiply-add, without remat.

    Attention counts all T keys, as in nanochat and PaLM, even if the mask is causal. A causal
    kernel computes half of attention's FLOPs; see `causal_share`.
    """
    matmul = sum(matrix_weights(config).values())
    attention = sum(
        sequence_length * m.query_heads * (m.query_dim + m.value_dim) for m in config.mechanisms
    )
    return 6 * (matmul + attention) + 3 * sum(m.extra_flops for m in config.mechanisms)


def causal_share(config: TransformerConfig, sequence_length: int) -> float:
    """Returns the ratio of training FLOPs with a causal kernel to those with all T keys."""
    all_keys = training_flops_per_token(config, sequence_length)
    return training_flops_per_token(config, sequence_length // 2) / all_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Costs of one decode step: one new token for `batch` sequences of `length` cached tokens.

    FLOPs count 2 per multiply-add of weights and attention; bytes are logical bytes read.
    """

    batch: int
    length: int
    weight_flops_per_token: int
    attention_flops_per_token: int
    weight_bytes: int  # read per step: every weight, but of embedding tables only the rows in use
    cache_bytes: int  # read per step: the caches of all sequences

    @property
    def flops_per_token(self) -> int:
        return self.weight_flops_per_token + self.attention_flops_per_token

    @property
    def bytes(self) -> int:
        """Bytes read per step."""
        return self.weight_bytes + self.cache_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes read per generated token."""
        return self.bytes / self.batch

    @property
    def intensity(self) -> float:
        """FLOP per byte read."""
        return self.batch * self.flops_per_token / self.bytes

    def seconds(self, device: Device) -> float:
        """Returns the roofline's lower bound of a step's time on one chip.

        That is the larger of bytes / bandwidth and FLOPs / peak.
        """
        flops = self.batch * self.flops_per_token
        return max(self.bytes / device.bandwidth, flops / device.bf16_flops)


def decode_cost(
    config: TransformerConfig,
    *,
    length: int,
    batch: int,
    dtype: jnp.dtype,
    cache_bits: int | None = None,
) -> DecodeCost:
    """Returns the costs of a decode step with weights in `dtype`.

    The cache is in `dtype` too, or quantised to `cache_bits`; dequantisation is not counted. Each
    query attends to `length` keys; in a layer with a shorter sliding window, to the window.
    """
    keys_by_layer = [min(length, kind.window or length) for _, kind in config.layers]
    flops = [mechanism.decode_flops(kind.rope_base) for mechanism, kind in config.layers]
    # Elements of the embedding tables, and elements of the rows that a step reads from them.
    tables = parameters(config)["embedding"]
    rows = batch * config.block.d_model * (2 if config.block.positions == "learned" else 1)
    if config.block.tied_head:  # the head reads the whole embedding
        head = config.vocab_size * config.block.d_model
        tables, rows = tables - head, rows - batch * config.block.d_model
    return DecodeCost(
        batch=batch,
        length=length,
        weight_flops_per_token=2 * sum(matrix_weights(config, decoding=True).values()),
        attention_flops_per_token=round(
            sum(
                f.per_query + keys * f.per_key for f, keys in zip(flops, keys_by_layer, strict=True)
            )
        ),
        weight_bytes=weight_bytes(config, dtype) - (tables - rows) * dtype.itemsize,
        cache_bytes=batch
        * sum(
            keys * entry_bytes(quantized.entry_of(mechanism, cache_bits), dtype)
            for mechanism, keys in zip(config.mechanisms, keys_by_layer, strict=True)
        ),
    )


def weight_bytes(config: TransformerConfig, dtype: jnp.dtype) -> int:
    """Returns the bytes of all weights in `dtype`."""
    return parameters(config)["total"] * dtype.itemsize


def largest_batch(
    config: TransformerConfig,
    *,
    length: int,
    dtype: jnp.dtype,
    device: Device,
    cache_bits: int | None = None,
) -> int:
    """Returns how many caches of `length` tokens fit on one chip beside the weights and RESERVE."""
    free = math.floor((1 - RESERVE) * device.hbm_bytes) - weight_bytes(config, dtype)
    return max(0, free // (length * cache_bytes_per_token(config, dtype, cache_bits)))
