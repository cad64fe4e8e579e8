"""Decode attention: checks its arguments, chooses an implementation and calls it.

Kernels are imported when they are first called, since Pallas takes a quarter of all import time.
"""

from collections.abc import Callable, Mapping
import importlib
import logging

import jax

from kvjax.cache import quantized, stripes
from kvjax.foundation.logs import log_once
from kvjax.kernels.decode_attention import reference, sharded, xla
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.layers import rope

_KERNELS = ("tpu", "gpu")  # one query per sequence


def _lazy(name: str, function: str) -> Callable:
    """Returns a function of the kernels' `attention` module, imported when it is called."""
    module = f"kvjax.kernels.decode_attention.{name}.attention"

    def call(*args, **options):
        return getattr(importlib.import_module(module), function)(*args, **options)

    call.__module__ = module  # `profile.measured.candidates` looks there for tile sizes
    return call


IMPLEMENTATIONS = {
    "xla": xla.decode_attention,
    **{name: _lazy(name, "decode_attention") for name in _KERNELS},
    "reference": reference.decode_attention,
}
_CHECKS = {name: _lazy(name, "check") for name in _KERNELS}


def decode_attention(
    inputs: DecodeInputs,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    window: int = 0,
    softcap: float = 0.0,
    implementation: str | None = None,
) -> jax.Array:
    """Attends with T new queries per sequence to its cache: [B, T, N, Hv], float32 or wider.

    If the mesh around this call has an axis "cache", the cache's tokens are split over it, and each
    chip attends to its own tokens (`sharded`).

    Args:
      inputs: queries, absorbed weights and flags of the mechanism.
      cache: the arrays of one layer, [B, *shape, S], with the new tokens appended.
      first_B: [B] slot of each sequence's first new token; token t sees slots 0 .. first_B + t.
      window: if positive, token t sees only the last `window` of these slots; not for kernels.
      softcap: c in c·tanh(z/c) of the scaled logits z, before a bias by position; 0: none; not for
        kernels.
      implementation: "xla" (supports every input), "tpu" or "gpu" (Pallas kernels), or "reference",
        which expands the whole cache. None: the kernel of the device compiled for if it supports
        the inputs, else "xla"; the reason is logged once.

    Raises:
      NotImplementedError: the implementation does not support the inputs; the message says why.
      ValueError: an unknown implementation, or a capacity above `rope.MAX_POSITION` under RoPE or
        with a bias by position.
    """
    S = next(iter(cache.values())).shape[-1]
    if S > rope.MAX_POSITION and _needs_angles(inputs):
        raise ValueError(f"a capacity of {S}: keys have angles up to {rope.MAX_POSITION} tokens")
    options = {"window": window} if window else {}  # kernels have no such arguments
    options |= {"softcap": softcap} if softcap else {}
    name = implementation or chosen(inputs, cache, **options)
    if options and not implementation and _device_kernels():
        what = " and ".join(options)
        log_once(__name__, logging.WARNING, f"decode attention: the kernels have no {what}: 'xla'")
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {name!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    check_takes(name, cache, options)
    if stripes.num_chips() > 1:
        return sharded.decode_attention(inputs, cache, first_B, implementation=name, **options)
    return IMPLEMENTATIONS[name](inputs, cache, first_B, **options)


def check_takes(
    name: str, cache: Mapping[str, jax.Array], options: Mapping[str, int | float]
) -> None:
    """Raises a NotImplementedError for a kernel with a window, a soft cap or too few bits."""
    if options and is_kernel(name):
        raise NotImplementedError(f"the {name.upper()} kernels have no {min(options)}: use 'xla'")
    bits = quantized.cached_bits(cache)
    if not reads(name, bits):
        raise NotImplementedError(f"the {name.upper()} kernels read no int{bits} cache: use 'xla'")


def reads(name: str, bits: int | None) -> bool:
    """Returns True if an implementation reads caches of these bits (None: not quantised)."""
    return bits is None or name != "gpu" or bits == 8


def _needs_angles(inputs: DecodeInputs) -> bool:
    """Returns True if scores depend on the angles of cached positions."""
    return inputs.rope_base is not None or inputs.bias is not None


def chosen(
    inputs: DecodeInputs,
    cache: Mapping[str, jax.Array],
    *,
    window: int = 0,
    softcap: float = 0.0,
    implementation: str | None = None,
) -> str:
    """Returns the name of the implementation that `decode_attention` calls."""
    return implementation or ("xla" if window or softcap else default(inputs, cache))


def default(inputs: DecodeInputs, cache: Mapping[str, jax.Array]) -> str:
    """Returns the name of the implementation that None stands for.

    It is "xla" on several devices, because XLA cannot partition a kernel, unless the cache is split
    over them: then each chip calls the kernel with its own part.
    """
    mesh, chips = jax.sharding.get_abstract_mesh(), stripes.num_chips()
    name = _device_kernels()
    if name is None or mesh.size > chips:
        return "xla"
    if chips > 1:
        if name not in sharded.IMPLEMENTATIONS:
            return "xla"
        cache = {
            field: jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // chips), x.dtype)
            for field, x in cache.items()
        }
    try:
        check_takes(name, cache, {})
        _CHECKS[name](inputs, cache)
    except NotImplementedError as error:
        log_once(__name__, logging.WARNING, f"decode attention: {error}")
        return "xla"
    return name


def _device_kernels() -> str | None:
    """Returns the name of the kernels for the device compiled for; None if it has none."""
    return kernels_of(jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0])


def kernels_of(device) -> str | None:
    """Returns the name of the kernels for a device, concrete or abstract; None if it has none."""
    return device.platform if device.platform in _KERNELS else None


def is_kernel(name: str | None) -> bool:
    """Returns True for the name of a kernel, which is limited to one query per sequence."""
    return name in _KERNELS
