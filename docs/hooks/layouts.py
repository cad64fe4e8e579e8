"""Tables of docs/decode.md: the arrays of every layout, and the implementations that support it."""

import dataclasses

import jax
import jax.numpy as jnp

from docs.hooks.support import CHECKS
import kvjax
from kvjax.library.layouts import LETTERS, Layout, shown, stored

B, S, T = 8, 4096, 1
SIZES = dict(N=16, K=16, J=1, H=128, Hv=128, R=64, Rv=64, C=512, P=64)
OWN = {  # sizes of a layout's example that differ from SIZES
    "grouped": dict(K=4),
    "tied": dict(J=16),
    "latents": dict(J=2, C=256),
    "factored": dict(J=16, R=32, Rv=128),
    "tensor_product": dict(R=2, Rv=2),
}


def letters() -> str:
    """Returns the table of axis letters."""
    rows = [f"| {name} | {text} |" for name, text in LETTERS.items()]
    return "\n".join(["| letter | |", "|---|---|", *rows])


def devices() -> str:
    """Returns a table of the implementations that support each layout, by their own checks."""
    head = ["layout", "mechanisms", "XLA (any device)", *CHECKS]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, spec in kvjax.LAYOUTS.items():
        cells = [f"[`{name}`](#{name})", spec.used_by, "yes"]
        cells += ["yes" if _takes(check, name, spec) else "no" for check in CHECKS.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def arrays() -> str:
    """Returns a section for each layout: its arrays with axes, an example's shapes and dtypes."""
    return "\n\n".join(_section(name, spec) for name, spec in kvjax.LAYOUTS.items())


def sizes_of(layout: str) -> dict[str, int]:
    """Returns the sizes of the example by letter."""
    sizes = SIZES | OWN.get(layout, {})
    return sizes | dict(B=B, S=S, T=T, G=sizes["N"] // sizes["J"]) | {"1": 1}


def example(layout: str) -> tuple[jax.ShapeDtypeStruct, kvjax.KVCache, dict]:
    """Returns the shapes of a layout's query, cache and other inputs in bfloat16."""
    spec, sizes = kvjax.LAYOUTS[layout], sizes_of(layout)

    def of(axes):
        shape = tuple(sizes[letter] for letter in axes.split())
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    known = {letter for axes in spec.cache.values() for letter in axes.split()} - {"1"}
    own = {letter: sizes[letter] for letter in known}
    cache = jax.eval_shape(
        lambda: kvjax.KVCache.allocate(layout, batch=B, capacity=S, dtype=jnp.bfloat16, **own)
    )
    return of(spec.query), cache, {name: of(axes) for name, axes in spec.arrays.items()}


def _section(name: str, spec: Layout) -> str:
    query, cache, inputs = example(name)
    lines = [f"### {name}", "", f"{spec.used_by}: `{spec.text}`", ""]
    lines += ["| array | axes | example | dtype |", "|---|---|---|---|"]
    lines.append(_row("query", spec.query, query, "any"))
    for array, axes in spec.cache.items():
        dtype = "float32" if array in spec.wide else "the cache's"
        lines.append(
            _row(
                f'cache["{array}"]',
                stored(axes),
                cache.arrays[array],
                dtype,
                _optional(spec, array),
            )
        )
    for array, axes in spec.arrays.items():
        lines.append(_row(array, axes, inputs[array], "any", _optional(spec, array)))
    if spec.numbers:
        lines += ["", *(f"- `{option}`: {text}" for option, text in spec.numbers.items())]
    return "\n".join(lines)


def _row(name: str, axes: str, array: jax.ShapeDtypeStruct, dtype: str, note: str = "") -> str:
    return f"| `{name}`{note} | `{shown(axes)}` | `{list(array.shape)}` | {dtype} |"


def _optional(spec: Layout, array: str) -> str:
    return " (optional)" if array in spec.optional else ""


def _takes(check, layout: str, spec: Layout) -> bool:
    query, cache, arrays = example(layout)
    if layout == "latent":  # its decode inputs are those of "latents" with one latent
        up = arrays["up_value"]
        arrays["up_value"] = jax.ShapeDtypeStruct((1, *up.shape), up.dtype)
    numbers = {name: 10_000.0 if name == "rope_base" else 1e-6 for name in spec.numbers}
    names = {field.name for field in dataclasses.fields(spec.inputs)}
    given = {name: value for name, value in (arrays | numbers).items() if name in names}
    try:
        check(spec.inputs(query=query, scale=0.1, **given), cache.arrays)
    except NotImplementedError:
        return False
    return True
