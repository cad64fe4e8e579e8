"""What a model costs, from its shapes: parameters, cache bytes, FLOPs, training memory."""

import dataclasses
import math

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.layers.weight import Axes
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer
from kvjax.optim import parameter_labels

PARTS = ("embedding", "attention", "mlp", "norm", "head")


def abstract_parameters(config: TransformerConfig) -> tuple[dict, dict]:
    """The parameter tree as ShapeDtypeStructs, and the same tree as axes strings."""
    model = nnx.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    state = nnx.state(model)
    is_variable = lambda x: isinstance(x, nnx.Variable)
    axes = jax.tree.map(lambda p: p.axes, state, is_leaf=is_variable)
    return nnx.to_pure_dict(state), nnx.to_pure_dict(axes)


def parameters(config: TransformerConfig) -> dict[str, int]:
    """Parameters by part, and "total"."""
    counts = dict.fromkeys(PARTS, 0)
    shapes, _ = abstract_parameters(config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
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
    return sum(
        math.prod(field.shape) * jnp.dtype(field.dtype or dtype).itemsize
        for mechanism in config.mechanisms
        for field in mechanism.entry().values()
    )


def training_flops_per_token(config: TransformerConfig, sequence_length: int) -> int:
    """Forward and backward, 2 FLOPs per multiply-add, rematerialisation not counted.

    Every matrix is used once per token; attention counts all T keys, causal or not (as nanochat
    and PaLM do; the arithmetic a causal kernel needs is half of that part).
    """
    shapes, axes = abstract_parameters(config)
    sizes = jax.tree.map(
        lambda shape, text: math.prod(shape.shape) if Axes.parse(text).is_matrix else 0,
        shapes,
        axes,
    )
    tied_head = config.vocab_size * config.block.d_model if config.block.tied_head else 0
    matmul = sum(jax.tree.leaves(sizes)) + tied_head
    attention = sum(
        sequence_length * m.num_heads * (m.query_dim + m.value_dim) for m in config.mechanisms
    )
    return 6 * (matmul + attention)


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes per device while training."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int  # an estimate: the compiler decides

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.activations


def training_memory(
    config: TransformerConfig,
    compute: Compute,
    *,
    rows_per_device: int,
    sequence_length: int,
    shards: int,
) -> TrainingMemory:
    """Bytes per device, with float32 master weights split over `shards` devices.

    Args:
      rows_per_device: rows of one pass through the model (after gradient accumulation).
    """
    shapes, axes = abstract_parameters(config)
    labels = parameter_labels(axes)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    moments = sum(  # Muon keeps one, Adam two
        math.prod(x.shape) * (1 if label == "matrix" else 2)
        for x, label in zip(jax.tree.leaves(shapes), jax.tree.leaves(labels), strict=True)
    )
    tokens = rows_per_device * sequence_length
    return TrainingMemory(
        parameters=4 * count // shards,
        optimizer=4 * moments // shards,
        gradients=4 * count // shards,
        activations=tokens * _activation_bytes_per_token(config, compute, sequence_length),
    )


def _activation_bytes_per_token(
    config: TransformerConfig, compute: Compute, sequence_length: int
) -> int:
    """What the backward pass keeps per token: a layer's input if rematerialised, or all of it.

    Within a fifth of the temporaries that XLA reports for the tiny configs on CPU.
    """
    c = config.block
    logits = 2 * 4 * config.vocab_size // compute.loss_chunks
    inside = [
        compute.dtype.itemsize
        * (
            2 * c.d_model  # normed inputs
            + 3 * m.num_heads * (m.query_dim + m.value_dim)  # q, k, v, before and after RoPE
            + m.num_heads * m.value_dim  # attention's output
            + 2 * c.mlp_dim
        )
        + 2 * 4 * m.num_heads * sequence_length  # logits and softmax, float32, all T keys
        for m in config.mechanisms
    ]
    kept = max(inside) if compute.remat == "full" else sum(inside)
    return kept + 2 * c.num_layers * c.d_model * compute.dtype.itemsize + logits
