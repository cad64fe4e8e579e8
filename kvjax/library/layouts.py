"""Cache layouts by name: the axes of cached arrays, and the inputs of decode attention."""

from collections.abc import Callable, Mapping
import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache import quantized
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts

LETTERS = {
    "B": "sequences",
    "T": "new tokens",
    "S": "capacity in tokens",
    "N": "query heads",
    "K": "KV heads, dividing N",
    "J": "bases or latents, dividing K",
    "H": "key channels of a head",
    "Hv": "value channels of a head",
    "R": "rank",
    "Rv": "rank of values",
    "C": "latent channels",
    "P": "channels of the RoPE key",
    "G": "query heads of a latent, N / J",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A cache layout: its arrays per token, and the inputs of decode attention beside the query.

    Attributes:
      text: how a key and a value follow from the cache.
      used_by: mechanisms with this cache.
      cache: axes of each cached array per token; the array itself is [B, *axes, S].
      query: axes of the query.
      arrays: axes of the other inputs.
      optional: names in `cache` and `arrays` that may be left out.
      numbers: other options, with their meaning.
      wide: cached arrays that are at least float32.
      keeps: cached arrays that a quantised cache has in the compute dtype.
    """

    text: str
    used_by: str
    inputs: Callable[..., cache_layouts.DecodeInputs]
    cache: Mapping[str, str]
    query: str = "B T N H"
    arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional: tuple[str, ...] = ()
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    wide: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ("rope_key",)


_ROPE = "RoPE's base if cached keys are not rotated; None: no RoPE"
_EPSILON = "epsilon of the keys' RMSNorm; None: not normed"
LAYOUTS = {
    "grouped": Layout(
        text="key = base_key, value = base_value",
        used_by="MHA, GQA, MQA, thin keys",
        inputs=cache_layouts.GroupedInputs,
        cache={"base_key": "K H", "base_value": "K Hv"},
    ),
    "residual": Layout(
        text="key = key_scale (base_key + Rot(residual_key expand_key)), "
        "value = base_value + residual_value expand_value; base_key is rotated",
        used_by="LRKV, LRKV x GQA",
        inputs=cache_layouts.ResidualInputs,
        cache={
            "base_key": "J H",
            "base_value": "J Hv",
            "residual_key": "K R",
            "residual_value": "K R",
            "key_scale": "K 1",
        },
        arrays={
            "expand_key": "K R H",
            "expand_value": "K R Hv",
            "residual_query": "B T N H",
        },
        optional=("key_scale", "residual_query"),
        numbers={"rope_base": "RoPE's base for the residual; None: the residual is not rotated"},
        wide=("key_scale",),
    ),
    "tied": Layout(
        text="value = base_key + residual_key expand_key, key = Rot(norm(value) gain)",
        used_by="Q-K=V, Q-GQA, Q-MQA",
        inputs=cache_layouts.TiedInputs,
        cache={"base_key": "J H", "residual_key": "K R"},
        arrays={"expand_key": "K R H", "gain": "H"},
        optional=("residual_key", "expand_key", "gain"),
        numbers={"rope_base": _ROPE, "norm_epsilon": _EPSILON},
    ),
    "latent": Layout(
        text="key = [latent, rope_key], value = latent up_value; the query is absorbed",
        used_by="MLA",
        inputs=cache_layouts.LatentInputs,
        cache={"latent": "C", "rope_key": "P"},
        query="B T N C",
        arrays={"rope_query": "B T N P", "up_value": "C N Hv"},
    ),
    "latents": Layout(
        text='as "latent", with J latents: query head n reads latent n J // N',
        used_by="GLA",
        inputs=cache_layouts.LatentInputs,
        cache={"latent": "J C", "rope_key": "P"},
        query="B T N C",
        arrays={"rope_query": "B T N P", "up_value": "J C G Hv"},
    ),
    "latent_residual": Layout(
        text="key = [latent, rope_key, residual_key], "
        "value = latent up_value + residual_value expand_value; the queries are absorbed",
        used_by="LRKV over MLA",
        inputs=cache_layouts.LatentResidualInputs,
        cache={"latent": "C", "rope_key": "P", "residual_key": "N R", "residual_value": "N R"},
        query="B T N C",
        arrays={
            "rope_query": "B T N P",
            "residual_query": "B T N R",
            "up_value": "C N Hv",
            "expand_value": "N R Hv",
        },
    ),
    "factored": Layout(
        text="key = key_scale Rot(key expand_key), value = value expand_value",
        used_by="factored keys and values",
        inputs=cache_layouts.FactoredInputs,
        cache={"key": "J R", "value": "J Rv", "key_scale": "K 1"},
        arrays={"expand_key": "K R H", "expand_value": "K Rv Hv"},
        optional=("key_scale",),
        numbers={"rope_base": _ROPE},
        wide=("key_scale",),
    ),
    "rebuilt": Layout(
        text="key = Rot(norm(latent up_key) gain), value = latent up_value",
        used_by="MLA without a RoPE key",
        inputs=cache_layouts.RebuiltInputs,
        cache={"latent": "C"},
        arrays={"up_key": "C N H", "up_value": "C N Hv", "gain": "H"},
        optional=("gain",),
        numbers={"rope_base": _ROPE, "norm_epsilon": _EPSILON},
    ),
    "tensor_product": Layout(
        text="key = sum_r key_head[r] key_factor[r], value = sum_r value_head[r] value_factor[r]",
        used_by="TPA",
        inputs=cache_layouts.TensorProductInputs,
        cache={
            "key_head": "N R",
            "key_factor": "R H",
            "value_head": "N Rv",
            "value_factor": "Rv Hv",
        },
    ),
}


def describe_layout(layout: str) -> str:
    """Returns a text with the layout's arrays, their axes and options."""
    spec = layout_of(layout)
    lines = [f"{layout} ({spec.used_by}): {spec.text}", f"  query {shown(spec.query)}"]
    for name, axes in spec.cache.items():
        end = ", float32" if name in spec.wide else ""
        lines.append(f"  cache {name} {shown(stored(axes))}{end}{_optional(spec, name)}")
    for name, axes in spec.arrays.items():
        lines.append(f"  input {name} {shown(axes)}{_optional(spec, name)}")
    lines += [f"  option {name}: {text}" for name, text in spec.numbers.items()]
    return "\n".join(lines)


def abstract_fields(
    layout: str,
    *,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    cache_dtype: str,
    sizes: Mapping[str, int],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a layout's cache, with the optional arrays whose sizes are all given.

    Raises:
      ValueError: a missing or unknown size, or a dtype that is none.
      UserError: see `quantized.bits_of` and `quantized.stored`.
    """
    check_dtype(dtype)
    spec = layout_of(layout)
    by_default = {"Hv": "H", "Rv": "R"}  # values have as many channels as keys
    defaults = {name: sizes[other] for name, other in by_default.items() if other in sizes}
    sizes = {"1": 1} | defaults | dict(sizes)
    known = {name for axes in spec.cache.values() for name in axes.split()}
    if unknown := sorted(sizes.keys() - known - {"Hv", "Rv", "1"}):
        raise ValueError(f"{unknown[0]}: layout {layout!r} has the sizes {_sizes(spec)}")
    fields = {}
    for name, axes in spec.cache.items():
        if missing := [letter for letter in axes.split() if letter not in sizes]:
            if name in spec.optional:
                continue
            raise ValueError(f"{missing[0]} is missing: layout {layout!r} needs {_sizes(spec)}")
        shape = tuple(sizes[letter] for letter in axes.split())
        kinds = dict(wide=name in spec.wide, keeps=name in spec.keeps)
        fields[name] = Field(axes.replace("v", ""), shape, **kinds)
    fields = quantized.stored(fields, quantized.bits_of(cache_dtype), f"layout {layout!r}")
    return {
        name: jax.ShapeDtypeStruct((batch, *field.shape, capacity), field.dtype_in(dtype))
        for name, field in fields.items()
    }


def check_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns a cache's dtype; raises a ValueError if it has no fractions."""
    if not jnp.issubdtype(dtype, jnp.floating):
        name = jnp.dtype(dtype).name
        raise ValueError(f"dtype = {name}: must be a floating-point dtype; cache_dtype quantises")
    return dtype


def layout_of(name: str) -> Layout:
    """Returns the layout of a name; raises a ValueError for an unknown name."""
    if name not in LAYOUTS:
        raise ValueError(f"layout = {name!r}: must be one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def stored(axes: str) -> str:
    """Returns the axes of a cached array, given its axes per token."""
    return f"B {axes} S"


def shown(axes: str) -> str:
    """Returns "[B, K, H]" for "B K H"."""
    return f"[{', '.join(axes.split())}]"


def _optional(spec: Layout, name: str) -> str:
    return ", optional" if name in spec.optional else ""


def _sizes(spec: Layout) -> str:
    """Returns the letters of a layout's sizes with their meaning."""
    letters = dict.fromkeys(name for axes in spec.cache.values() for name in axes.split())
    return ", ".join(f"{name} ({LETTERS[name]})" for name in letters if name in LETTERS)
