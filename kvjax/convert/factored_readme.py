"""README.md of an export in the factored format: the model's tensors, equations and cache."""

import inspect
import math

from kvjax.attention import kind_of
from kvjax.attention.mechanism import check_convertible
from kvjax.foundation import output
from kvjax.foundation.errors import UserError
from kvjax.layers.weight import LETTERS, Axes
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig

KINDS = ("grouped", "factored", "mla", "mla_paper")  # mechanisms that the format supports


def text(name: str, config: TransformerConfig, *, context: int) -> str:
    """Returns the README of one model; raises as `check` does."""
    check(config)
    equations = inspect.getdoc(inspect.getmodule(type(config.mechanisms[0])))
    parts = [
        f"# {name}",
        f"A language model of {config.block.num_layers} layers, trained on rows of {context:,} "
        "tokens, with its keys and values as factors, so that the KV cache is small. Written by "
        "kvjax, which reads it with `python -m kvjax.convert --source=FOLDER --out=WORKDIR`.",
        "## Tensors",
        "`config.json` has the options, `model.safetensors` (or the files in "
        "`model.safetensors.index.json`) the tensors, `tokenizer.json` the tokenizer. "
        "A weight `D -> N H` is a linear map, stored [D, N, H]: y[n, h] = Σ_d x[d] w[d, n, h]. "
        "`K: R -> H` is K maps, stored [K, R, H]; `N H` a vector.",
        *_tensors(config),
        "Letters: " + ", ".join(_letters(config)) + ".",
        "## Attention",
        equations,
        "`kvjax/attention` has norms and RoPE of queries and keys, `kvjax/model/transformer.py` "
        "the rest of the model, both by the keys of `config.json`.",
        "## Cache",
        *_cache(config),
        "`kvjax/kernels/decode_attention` decodes from it.",
    ]
    return "\n\n".join(parts) + "\n"


def check(config: TransformerConfig) -> None:
    """Raises a UserError if the format does not support a mechanism."""
    for mechanism in config.mechanisms:
        if (kind := kind_of(mechanism)) not in KINDS:
            raise UserError(
                f"config.attention.kind = {kind!r}: --format=factored keeps {', '.join(KINDS)}"
            )
        check_convertible(mechanism, "--format=factored does not keep this key")


def _layers(config: TransformerConfig) -> list[str]:
    """Returns the layers of each segment, as "0 to 3"."""
    names, first = [], 0
    for _, length in config.layer_groups:
        names.append(f"{first} to {first + length - 1}" if length > 1 else f"{first}")
        first += length
    return names


def _tensors(config: TransformerConfig) -> list[str]:
    """Returns a table of the tensors outside the layers, and one per layer shape."""
    shapes, axes = parameters.abstract(config)
    outer = {key: value for key, value in shapes.items() if key != "segments"}
    parts = ["\n".join(_table("", outer, axes, front=0))]
    for i, layers in enumerate(_layers(config)):
        rows = _table("layers.{i}.", shapes["segments"][i], axes["segments"][i], front=1)
        parts += [f"With i from {layers}:" if "to" in layers else f"With i = {layers}:"]
        parts += ["\n".join(rows)]
    return parts


def _table(prefix: str, shapes: dict, axes: dict, *, front: int) -> list[str]:
    rows = [
        (f"`{prefix}{name}`", f"`{text}`", str(list(leaf.shape[front:])))
        for name, leaf, text in _leaves(shapes, axes)
    ]
    return output.markdown(("tensor", "axes", "shape"), rows)


def _leaves(shapes: dict, axes: dict, name: str = ""):
    for key, value in shapes.items():
        if isinstance(value, dict):
            yield from _leaves(value, axes[key], f"{name}{key}.")
        else:
            yield f"{name}{key}", value, axes[key]


def _letters(config: TransformerConfig) -> list[str]:
    """Returns the meanings of the axis letters in the tables."""
    used = set()
    shapes, axes = parameters.abstract(config)
    for _, _, text in _leaves(shapes, axes):
        used.update(Axes.parse(text).names)
    return [f"{letter} {meaning}" for letter, meaning in LETTERS.items() if letter in used]


def _cache(config: TransformerConfig) -> list[str]:
    """Returns a table of the cache's fields per token, and the total over layers."""
    rows, total = [], 0
    for layers, (mechanism, length) in zip(_layers(config), config.layer_groups, strict=True):
        for name, field in mechanism.entry().items():
            elements = math.prod(field.shape)
            rows.append((layers, name + " (float32)" * field.wide, f"`{field.axes}`", elements))
            total += elements * length
    header = ("layers", "field", "axes", "elements per token and layer")
    return ["\n".join(output.markdown(header, rows)), f"In all {total:,} elements per token."]
