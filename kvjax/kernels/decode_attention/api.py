"""Which implementation of decode attention runs.

Kernels are imported where they run: Pallas takes a quarter of the time in which a process starts.
"""

from collections.abc import Callable, Mapping
import importlib
import logging

import jax
import jax.numpy as jnp

from kvjax.cache import stripes
from kvjax.foundation.logs import log_once
from kvjax.kernels.decode_attention import reference, sharded, xla
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.layers import rope

_KERNELS = ("tpu", "gpu")  # one query per sequence


def _of_kernels(name: str, function: str) -> Callable:
    """A function of a kernel's `attention` module, said to be of that module."""
    module = f"kvjax.kernels.decode_attention.{name}.attention"

    def call(*args, **options):
        return getattr(importlib.import_module(module), function)(*args, **options)

    call.__module__ = module
    return call


IMPLEMENTATIONS = {
    "xla": xla.decode_attention,
    **{name: _of_kernels(name, "decode_attention") for name in _KERNELS},
    "reference": reference.decode_attention,
}
_CHECKS = {name: _of_kernels(name, "check") for name in _KERNELS}


def decode_attention(
    operands: DecodeInputs,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    window: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of T new queries per sequence over its cache: [B, T, N, Hv], float32 or wider.

    Where the mesh around this call has an axis "cache", the cache's tokens are split over it, and
    each chip attends over those it holds: `sharded`.

    Args:
      operands: queries, and the weights that the mechanism folds into reading its cache.
      cache: the arrays of one layer, [B, *shape, S]; the new tokens are in it already.
      first_B: [B] slot of each sequence's first new token; token t sees slots 0 .. first_B + t.
      window: if positive, it sees the last so many of those; kernels have none.
      implementation: "xla", which takes everything; "tpu" and "gpu", Pallas kernels;
        "reference", which expands the whole cache; None: the kernels of the device that is
        compiled for where they take these operands, "xla" where not; the log says why, once.

    Raises:
      NotImplementedError: the implementation does not take these operands; the message says why.
      ValueError: an unknown implementation, or a capacity whose positions have no angles.
    """
    S = next(iter(cache.values())).shape[-1]
    if S > rope.MAX_POSITION and _needs_angles(operands):
        raise ValueError(f"a capacity of {S}: keys have angles up to {rope.MAX_POSITION} tokens")
    name = implementation or ("xla" if window else default(operands, cache))
    _check_known(name)
    if window and is_kernel(name):
        raise NotImplementedError(f"the {name.upper()} kernels have no window: use 'xla'")
    how = dict(window=window) if window else {}
    if stripes.num_chips() > 1:
        return sharded.decode_attention(operands, cache, first_B, implementation=name, **how)
    return IMPLEMENTATIONS[name](operands, cache, first_B, **how)


def memory_attention(
    operands: DecodeInputs,
    cache: Mapping[str, jax.Array],
    lengths_B: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of T queries per sequence over a memory that each sees whole: [B, T, N, Hv].

    One query per sequence is what `decode_attention` takes after the memory's last token: kernels
    serve it. Several go by XLA.

    Args:
      cache: arrays [B, *shape, S] written once; finite behind a memory's length.
      lengths_B: [B] tokens of each memory; of one that is empty the output is 0.

    Raises:
      NotImplementedError: several queries by a kernel, or over a memory that is split over chips.
      ValueError: an unknown implementation.
    """
    last_B = jnp.maximum(lengths_B - 1, 0)
    if operands.query.shape[1] == 1:
        o_BTNH = decode_attention(operands, cache, last_B, implementation=implementation)
    else:
        name = implementation or "xla"
        _check_known(name)
        if is_kernel(name):
            raise NotImplementedError(
                f"implementation = {name!r}: several queries over a whole memory are for 'xla' and "
                "'reference'"
            )
        if stripes.num_chips() > 1:
            raise NotImplementedError("several queries over a memory that is split over chips")
        o_BTNH = IMPLEMENTATIONS[name](operands, cache, last_B, causal=False)
    return jnp.where((lengths_B > 0)[:, None, None, None], o_BTNH, 0)


def _check_known(name: str) -> None:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {name!r}: must be one of {', '.join(IMPLEMENTATIONS)}")


def _needs_angles(operands: DecodeInputs) -> bool:
    """Whether reading a cache takes the angles of its positions."""
    return operands.rope_base is not None or operands.bias is not None


def default(operands: DecodeInputs, cache: Mapping[str, jax.Array]) -> str:
    """The implementation that None stands for; XLA does not divide a kernel between devices."""
    mesh, chips = jax.sharding.get_abstract_mesh(), stripes.num_chips()
    name = kernels_of(mesh.abstract_device or jax.devices()[0])
    if name is None or mesh.size > chips:
        return "xla"
    if chips > 1:
        if name not in sharded.IMPLEMENTATIONS:
            return "xla"
        of_chip = lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // chips), x.dtype)
        cache = {field: of_chip(array) for field, array in cache.items()}
    try:
        _CHECKS[name](operands, cache)
    except NotImplementedError as error:
        log_once(__name__, logging.WARNING, f"decode attention: {error}")
        return "xla"
    return name


def kernels_of(device) -> str | None:
    """The name of the kernels for a device (of `jax.devices()` or an abstract one), if any."""
    return device.platform if device.platform in _KERNELS else None


def is_kernel(name: str | None) -> bool:
    """Whether an implementation is a kernel: on one kind of device, one query per sequence."""
    return name in _KERNELS
