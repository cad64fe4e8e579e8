"""Rules that map tensors of a published model to weights, in both directions.

A rule names a published tensor and the weights in it. `to_tensor` inverts `from_tensor`, but does
not write the layouts of GGUF and DeepSeek.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math

import numpy as np

from kvjax.layers.weight import Axes
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.parameters import Path

BLOCK: Path = ("segments", 0)  # path of the layers: one segment, stacked along the first axis


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a kvjax model; of one layer if it belongs to a block."""

    shape: tuple[int, ...]
    axes: Axes

    @property
    def is_table(self) -> bool:
        """True if it has one row per token or position."""
        return not self.axes.is_matrix and len(self.axes.output) > 1 and self.axes.output[0] in "VT"

    @property
    def matrix(self) -> tuple[int, ...]:
        """[in, out] of a matrix, [out] of a vector."""
        if not self.axes.is_matrix:
            return (math.prod(self.shape),)
        split = len(self.axes.reduction)
        return math.prod(self.shape[:split]), math.prod(self.shape[split:])


def weights_of(config: TransformerConfig) -> dict[Path, Weight]:
    """Returns shape and axes of each weight of a model whose layers all have one shape."""
    axes = parameters.axes(config)

    def of_layer(path, shape):
        return shape[1:] if path[: len(BLOCK)] == BLOCK else shape

    return {
        path: Weight(of_layer(path, shape), axes[path])
        for path, shape in parameters.shapes(config).items()
    }


# -- rules: published tensors and the weights in them ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """A published tensor and the weights in it, concatenated along their outputs."""

    tensor: str  # its name, with {i} for the layer
    weights: tuple[Path, ...]
    transposed: bool = True  # a matrix is [out, in], as in torch's Linear; False: [in, out]
    # RoPE rotates pairs (2i, 2i + 1) of a head, as in llama.cpp; False: (i, i + H/2).
    interleaved: bool = False
    # RoPE rotates by -t·theta, as in nanochat, which equals swapping the halves of a head.
    reversed: bool = False
    # Layouts of DeepSeek:
    by_head: bool = False  # the tensor has, head by head, the head's channels of all weights
    last_interleaved: bool = False  # as `interleaved`, for the last weight only
    gain: str = ""  # tensor of gains, to be multiplied into the matrix's inputs
    beside: tuple[Path, ...] = ()  # further weights that a model with this tensor must have

    @property
    def in_block(self) -> bool:
        return "{i}" in self.tensor


def _rule(tensor: str, *weights: str, **layout) -> Rule:
    """Builds a rule from dotted names; tensors with {i} belong to a block."""
    first = BLOCK if "{i}" in tensor else ()

    def path(name: str) -> Path:
        return (*first, *name.split("."))

    layout["beside"] = tuple(map(path, layout.get("beside", ())))
    return Rule(tensor, tuple(map(path, weights)), **layout)


def tensor_shape(rule: Rule, weights: Sequence[Weight]) -> tuple[int, ...]:
    """Returns the shape that a rule's tensor must have."""
    if weights[0].is_table:
        return weights[0].shape
    *inputs, _ = weights[0].matrix
    outputs = sum(weight.matrix[-1] for weight in weights)
    return (outputs, *inputs) if rule.transposed else (*inputs, outputs)


def from_tensor(rule: Rule, tensor: np.ndarray, weights: Sequence[Weight]) -> list[np.ndarray]:
    """Splits a published tensor into its weights, in the rule's order."""
    if weights[0].is_table:
        return [tensor]
    by_output = tensor if rule.transposed else tensor.T
    inputs = by_output.shape[1:]
    sizes = [weight.matrix[-1] for weight in weights]
    if rule.by_head:
        heads = weights[0].shape[-2]
        by_output = by_output.reshape(heads, -1, *inputs)
        sizes = [size // heads for size in sizes]
    parts = np.split(by_output, np.cumsum(sizes)[:-1], axis=int(rule.by_head))
    arrays = []
    for weight, part in zip(weights, parts, strict=True):
        part = part.reshape(-1, *inputs)
        if rule.interleaved or (rule.last_interleaved and weight is weights[-1]):
            part = _swap_pairs(part, weight.shape[-1])
        if rule.reversed:
            part = _swap_halves(part, weight.shape[-1])
        arrays.append(part.T.reshape(weight.shape))
    return arrays


def to_tensor(rule: Rule, arrays: Sequence[np.ndarray], weights: Sequence[Weight]) -> np.ndarray:
    """Joins weights into their published tensor: the inverse of `from_tensor`."""
    assert not (rule.interleaved or rule.by_head or rule.gain)
    if weights[0].is_table:
        return arrays[0]
    parts = []
    for weight, array in zip(weights, arrays, strict=True):
        part = array.reshape(weight.matrix).T
        if rule.reversed:
            part = _swap_halves(part, weight.shape[-1])
        parts.append(part)
    by_output = np.concatenate(parts)
    return by_output if rule.transposed else by_output.T


def _swap_pairs(outputs: np.ndarray, channels: int) -> np.ndarray:
    """Moves channels 2i and 2i + 1 of every head to i and i + H/2."""
    split = outputs.reshape(-1, channels // 2, 2, *outputs.shape[1:])
    return split.swapaxes(1, 2).reshape(outputs.shape)


def _swap_halves(outputs: np.ndarray, channels: int) -> np.ndarray:
    """Swaps the two halves of every head in outputs [heads * channels, ...]."""
    split = outputs.reshape(-1, 2, channels // 2, *outputs.shape[1:])
    return split[:, ::-1].reshape(outputs.shape)


_QUERY, _KEY, _VALUE = (
    f"attention.mechanism.{name}" for name in ("query", "base_key", "base_value")
)


def gpt2_rules() -> tuple[Rule, ...]:
    """Returns transformers' names for GPT-2, whose matrices are [in, out]."""
    layer = "transformer.h.{i}."
    rules = [
        _rule("transformer.wte.weight", "embedding"),
        _rule("transformer.wpe.weight", "positions"),
        _rule("lm_head.weight", "head"),
    ]
    for tensor, norm in (
        ("transformer.ln_f", "final_norm"),
        (f"{layer}ln_1", "attention_norm"),
        (f"{layer}ln_2", "mlp_norm"),
    ):
        rules.append(_rule(f"{tensor}.weight", f"{norm}.gain"))
        rules.append(_rule(f"{tensor}.bias", f"{norm}.bias"))
    for tensor, weights in (
        ("attn.c_attn", (_QUERY, _KEY, _VALUE)),
        ("attn.c_proj", ("attention.out",)),
        ("mlp.c_fc", ("mlp.up",)),
        ("mlp.c_proj", ("mlp.down",)),
    ):
        rules.append(_rule(f"{layer}{tensor}.weight", *weights, transposed=False))
        rules.append(_rule(f"{layer}{tensor}.bias", *(f"{name}_bias" for name in weights)))
    return tuple(rules)


def llama_rules() -> tuple[Rule, ...]:
    """Returns transformers' names for Llama and its relatives, with the norms and biases of all."""
    layer = "model.layers.{i}."
    rules = [
        _rule("model.embed_tokens.weight", "embedding"),
        _rule("model.norm.weight", "final_norm.gain"),
        _rule("lm_head.weight", "head"),
        _rule(f"{layer}input_layernorm.weight", "attention_norm.gain"),
        _rule(f"{layer}post_attention_layernorm.weight", "mlp_norm.gain"),
        _rule(f"{layer}self_attn.q_norm.weight", "attention.mechanism.query_norm.gain"),
        _rule(f"{layer}self_attn.k_norm.weight", "attention.mechanism.key_norm.gain"),
        _rule(f"{layer}mlp.gate_proj.weight", "mlp.gate"),
        _rule(f"{layer}mlp.up_proj.weight", "mlp.up"),
        _rule(f"{layer}mlp.down_proj.weight", "mlp.down"),
    ]
    return (*rules, *_projections(f"{layer}self_attn.", reversed=False))


def olmo2_rules() -> tuple[Rule, ...]:
    """Returns transformers' names for OLMo 2, which normalises outputs instead of inputs."""
    layer = "model.layers.{i}."
    return (
        *(rule for rule in llama_rules() if not rule.tensor.endswith("_layernorm.weight")),
        _rule(f"{layer}post_attention_layernorm.weight", "attention_norm.gain"),
        _rule(f"{layer}post_feedforward_layernorm.weight", "mlp_norm.gain"),
    )


def gemma_rules() -> tuple[Rule, ...]:
    """Returns transformers' names for Gemma 2 and 3, which normalise inputs and outputs."""
    layer = "model.layers.{i}."
    return (
        *(rule for rule in llama_rules() if "post_attention" not in rule.tensor),
        _rule(f"{layer}post_attention_layernorm.weight", "attention_out_norm.gain"),
        _rule(f"{layer}pre_feedforward_layernorm.weight", "mlp_norm.gain"),
        _rule(f"{layer}post_feedforward_layernorm.weight", "mlp_out_norm.gain"),
    )


def phi3_rules() -> tuple[Rule, ...]:
    """Returns transformers' names for Phi-3, which joins projections of one input."""
    layer = "model.layers.{i}."
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return (
        *(rule for rule in llama_rules() if rule.tensor.split(".")[-2] not in joined),
        _rule(f"{layer}self_attn.qkv_proj.weight", _QUERY, _KEY, _VALUE),
        _rule(f"{layer}mlp.gate_up_proj.weight", "mlp.gate", "mlp.up"),
    )


def nanochat_rules() -> tuple[Rule, ...]:
    """Returns transformers' names for nanochat, whose norms have no weights."""
    layer = "model.layers.{i}."
    rules = [
        _rule("model.embed_tokens.weight", "embedding"),
        _rule("lm_head.weight", "head"),
        _rule(f"{layer}mlp.fc1.weight", "mlp.up"),
        _rule(f"{layer}mlp.fc2.weight", "mlp.down"),
    ]
    return (*rules, *_projections(f"{layer}self_attn.", reversed=True))


def _projections(prefix: str, *, reversed: bool) -> Iterator[Rule]:
    """Yields the rules of attention's projections.

    Args:
      reversed: `Rule.reversed` of queries and keys.
    """
    for tensor, weight in (
        ("q_proj", _QUERY),
        ("k_proj", _KEY),
        ("v_proj", _VALUE),
        ("o_proj", "attention.out"),
    ):
        swaps = reversed and weight in (_QUERY, _KEY)
        yield _rule(f"{prefix}{tensor}.weight", weight, reversed=swaps)
        yield _rule(f"{prefix}{tensor}.bias", f"{weight}_bias", reversed=swaps)


def deepseek_rules() -> tuple[Rule, ...]:
    """Returns transformers' names for DeepSeek-V2 and V3 without experts.

    kvjax's norms of latents have no gains: they are multiplied into the projections that follow.
    """
    layer, mechanism = "model.layers.{i}.self_attn.", "attention.mechanism."
    of_llama = [rule for rule in llama_rules() if "self_attn" not in rule.tensor]
    query, rope_query, down = (
        f"{mechanism}{name}" for name in ("query", "rope_query", "query_down")
    )
    queries = dict(by_head=True, last_interleaved=True)
    gain = f"{layer}q_a_layernorm.weight"
    return (
        *of_llama,
        _rule(f"{layer}q_proj.weight", query, rope_query, **queries),
        _rule(f"{layer}q_a_proj.weight", down),
        _rule(f"{layer}q_b_proj.weight", query, rope_query, **queries, gain=gain, beside=(down,)),
        _rule(
            f"{layer}kv_a_proj_with_mqa.weight",
            f"{mechanism}down",
            f"{mechanism}rope_key",
            last_interleaved=True,
        ),
        _rule(
            f"{layer}kv_b_proj.weight",
            f"{mechanism}up_key",
            f"{mechanism}up_value",
            by_head=True,
            gain=f"{layer}kv_a_layernorm.weight",
        ),
        _rule(f"{layer}o_proj.weight", "attention.out"),
    )
