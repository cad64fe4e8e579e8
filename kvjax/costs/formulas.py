"""What a model costs, from its shapes: parameters, cache bytes, FLOPs, decoding.

    python -m kvjax.costs --config=configs/lrkv_2p5b.py    # as tables

Bytes are logical: what the formulas say, without tiling, padding or copies.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax.cache.field import Field
from kvjax.hardware.datasheets import Device
from kvjax.layers.weight import Axes
from kvjax.model import parameters as parameter_lib
from kvjax.model.config import TransformerConfig

COMPONENTS = ("embedding", "attention", "mlp", "norm", "head")
# The part of a device's memory kept free for activations, temporaries and the runtime: a choice,
# which is vLLM's default too.
RESERVE = 0.1


def parameters(config: TransformerConfig) -> dict[str, int]:
    """Parameters by part, and "total"."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_lib.abstract(config).shapes):
        counts[_part(tuple(entry.key for entry in path))] += math.prod(leaf.shape)
    return counts | {"total": sum(counts.values())}


def _part(keys: tuple) -> str:
    if keys[0] in ("embedding", "positions"):
        return "embedding"
    if keys[0] == "head":
        return "head"
    return next((part for part in ("attention", "mlp") if part in keys), "norm")


def cache_bytes_per_token(config: TransformerConfig, dtype: jnp.dtype) -> int:
    """Bytes the KV cache keeps per token, all layers, by each mechanism's own entry.

    LRKV: eq. 5, plus 4 bytes per KV head for 1/rms where keys are normed.
    """
    return sum(entry_bytes(mechanism.entry(), dtype) for mechanism in config.mechanisms)


def entry_bytes(entry: dict[str, Field], dtype: jnp.dtype) -> int:
    """Bytes of one token's entry in the cache of a layer."""
    sizes = (math.prod(f.shape) * f.dtype_in(dtype).itemsize for f in entry.values())
    return sum(sizes)


def chip_cache_bytes_per_token(
    config: TransformerConfig, dtype: jnp.dtype, *, chips: int, by: str
) -> float:
    """Bytes of the KV cache per token that the fullest of several chips keeps.

    Args:
      by: "tokens", an even share each; "heads": every chip has the KV heads and the bases that its
        query heads read, so what heads share is on several chips. An LRKV base and an MLA latent
        serve all heads: every chip has them.
    """
    if by == "tokens":
        return cache_bytes_per_token(config, dtype) / chips
    if by != "heads":
        raise ValueError(f"by = {by!r}: must be 'tokens' or 'heads'")
    chips = min(chips, max(m.num_heads for m in config.mechanisms))  # more have none, or one each
    return max(
        sum(_bytes_of_heads(m, dtype, *_heads_of_chip(m, chip, chips)) for m in config.mechanisms)
        for chip in range(chips)
    )


def _heads_of_chip(mechanism, chip: int, chips: int) -> tuple[int, int]:
    """Its first query head and the one after its last; at most as many chips as heads have one."""
    N = mechanism.num_heads
    return chip * N // chips, (chip + 1) * N // chips


def _bytes_of_heads(mechanism, dtype: jnp.dtype, first: int, end: int) -> int:
    """Bytes per token of the entries that query heads first .. end - 1 read."""
    if first == end:
        return 0
    total = 0
    for field in mechanism.entry().values():
        elements, heads = math.prod(field.shape), field.heads
        if heads is not None:  # query head n reads n·heads // N
            of = lambda n, heads=heads: n * heads // mechanism.num_heads
            elements = elements // heads * (of(end - 1) - of(first) + 1)
        total += elements * field.dtype_in(dtype).itemsize
    return total


def matrix_weights(config: TransformerConfig, *, decoding: bool = False) -> dict[str, int]:
    """Weights by part that multiply a token: a tied head counts, tables, gains and biases do not.

    Args:
      decoding: without the weights that decoding absorbs into query and output.
    """
    counts = dict.fromkeys(COMPONENTS, 0)
    shapes, axes = parameter_lib.abstract(config)
    absorbed = [mechanism.absorbed if decoding else () for mechanism, _ in config.layer_groups]
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), text in zip(leaves, jax.tree.leaves(axes), strict=True):
        keys = tuple(entry.key for entry in path)
        folded = "mechanism" in keys and keys[-1] in absorbed[keys[1]]
        if Axes.parse(text).is_matrix and not folded:
            counts[_part(keys)] += math.prod(leaf.shape)
    if config.block.tied_head:
        counts["head"] = config.vocab_size * config.block.d_model
    return counts


def training_flops_per_token(config: TransformerConfig, sequence_length: int) -> int:
    """Forward and backward, 2 FLOPs per multiply-add, rematerialisation not counted.

    Every matrix is used once per token; attention counts all T keys, causal or not (as nanochat
    and PaLM do; the arithmetic a causal kernel needs is half of that part).
    """
    matmul = sum(matrix_weights(config).values())
    attention = sum(
        sequence_length * m.query_heads * (m.query_dim + m.value_dim) for m in config.mechanisms
    )
    return 6 * (matmul + attention) + 3 * sum(m.extra_flops for m in config.mechanisms)


def causal_share(config: TransformerConfig, sequence_length: int) -> float:
    """The share of those FLOPs that is left if attention counts only keys under the causal mask."""
    everything = training_flops_per_token(config, sequence_length)
    return training_flops_per_token(config, sequence_length // 2) / everything


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """One step of decoding: one new token in each of `batch` sequences of `length` cached tokens.

    FLOPs are 2 per multiply-add of matrices and attention; bytes are those read, logical.
    """

    batch: int
    length: int
    weight_flops_per_token: int
    attention_flops_per_token: int
    weight_bytes: int  # every weight once per step, of input tables the rows looked up
    cache_bytes: int  # of all sequences, read once per step

    @property
    def flops_per_token(self) -> int:
        return self.weight_flops_per_token + self.attention_flops_per_token

    @property
    def bytes(self) -> int:
        """Read per step."""
        return self.weight_bytes + self.cache_bytes

    @property
    def bytes_per_token(self) -> float:
        """Read per generated token."""
        return self.bytes / self.batch

    @property
    def intensity(self) -> float:
        """FLOP per byte read."""
        return self.batch * self.flops_per_token / self.bytes

    def seconds(self, device: Device) -> float:
        """The least a step can take on one chip: its bytes at full bandwidth or, if more, its FLOPs
        at the full dense bfloat16 rate."""
        flops = self.batch * self.flops_per_token
        return max(self.bytes / device.bandwidth, flops / device.bf16_flops)


def decode_cost(
    config: TransformerConfig, *, length: int, batch: int, dtype: jnp.dtype
) -> DecodeCost:
    """What a decode step costs with weights and cache in `dtype`.

    Each query sees `length` keys, or those in the model's window.
    """
    base = config.block.angles_base
    seen = min(length, config.block.window or length)
    flops = [mechanism.decode_flops(base) for mechanism in config.mechanisms]
    tables = parameters(config)["embedding"]
    looked_up = batch * config.block.d_model * (2 if config.block.positions == "learned" else 1)
    if config.block.tied_head:  # then the embedding is read whole, as the head
        head = config.vocab_size * config.block.d_model
        tables, looked_up = tables - head, looked_up - batch * config.block.d_model
    return DecodeCost(
        batch=batch,
        length=length,
        weight_flops_per_token=2 * sum(matrix_weights(config, decoding=True).values()),
        attention_flops_per_token=round(sum(f.per_query + seen * f.per_key for f in flops)),
        weight_bytes=weight_bytes(config, dtype) - (tables - looked_up) * dtype.itemsize,
        cache_bytes=batch * seen * cache_bytes_per_token(config, dtype),
    )


def weight_bytes(config: TransformerConfig, dtype: jnp.dtype) -> int:
    """Bytes of all weights in `dtype`, as they lie in memory while decoding."""
    return parameters(config)["total"] * dtype.itemsize


def largest_batch(
    config: TransformerConfig, *, length: int, dtype: jnp.dtype, device: Device
) -> int:
    """Sequences of `length` tokens whose caches fit one chip beside the weights; 0 if none does.

    A part of memory, RESERVE, is left for everything else.
    """
    free = math.floor((1 - RESERVE) * device.hbm_bytes) - weight_bytes(config, dtype)
    return max(0, free // (length * cache_bytes_per_token(config, dtype)))
