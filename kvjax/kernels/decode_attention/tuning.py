"""Tile sizes by device kind and shape, from `tuned.json`, which the profiler writes.

    {"TPU v5 lite": {"tpu/residual_rotated/bfloat16-N18-K18-J1-R64-H128-V128-B1-S32768":
        {"parameters": {"tile_kv": 1024}, "source": "measured", ...}}}

A length or batch without an entry takes the nearest smaller one's. `source` is "measured", or
"static" if the bundles of the compiler's schedule were counted and nothing ran.
"""

from collections.abc import Mapping
import functools
import json
import logging
import math
import pathlib
import re

from etils import epath
import jax

from kvjax.foundation.files import write_atomically
from kvjax.foundation.logs import log_once
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs

FILE = pathlib.Path(__file__).with_name("tuned.json")
SOURCES = ("measured", "static")
_KNOWN = {"base_key", "base_value", "residual_key", "residual_value", "key_scale"}
_KNOWN |= {"latent", "rope_key"}  # fields whose shapes the letters of a key give


def current_device_kind() -> str:
    """Returns the kind of the device compiled for; by default the first device's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device or jax.devices()[0]).device_kind


def key(implementation: str, inputs: DecodeInputs, cache: Mapping[str, jax.Array]) -> str:
    """Returns an entry's key: implementation, cache layout, sizes, batch, capacity."""
    sizes = dict(N=inputs.query.shape[2])
    for letter, name, axis in (
        ("K", "base_key", 1),
        ("H", "base_key", 2),
        ("V", "base_value", 2),
        ("C", "latent", -2),
        ("P", "rope_key", 1),
        ("R", "residual_key", 2),
    ):
        if name in cache:
            sizes[letter] = cache[name].shape[axis]
    if "residual_key" in cache:
        sizes |= dict(J=sizes["K"], K=cache["residual_key"].shape[1])
    if "latent" in cache and cache["latent"].ndim > 3:
        sizes["G"] = math.prod(cache["latent"].shape[1:-2])
    array = next(iter(cache.values()))
    dims = [f"{letter}{sizes[letter]}" for letter in "NKJRHVGCP" if letter in sizes]
    others = cache.keys() - _KNOWN  # in cache layouts that no kernel takes
    dims += [f"{name}{'x'.join(map(str, cache[name].shape[1:-1]))}" for name in sorted(others)]
    dims = [str(array.dtype), *dims]
    dims += [f"B{array.shape[0]}", f"S{array.shape[-1]}"]
    return f"{implementation}/{inputs.kind(cache)}/{'-'.join(dims)}"


def parameters(
    key: str,
    device_kind: str | None = None,
    *,
    default: Mapping[str, int],
    nearest: bool = True,
) -> dict[str, int]:
    """Returns the tuned parameters under a key; the default if no entry can be used.

    Args:
      key: see `key`.
      device_kind: as JAX names it; None: `current_device_kind()`.
      default: every parameter that the implementation takes. Its use is logged once per key.
      nearest: True to accept an entry of a smaller batch or length.
    """
    kind = device_kind or current_device_kind()
    try:
        entries = _entries(FILE, kind)
        entry = _nearest(entries if nearest else {k: entries[k] for k in entries if k == key}, key)
        tuned = _checked(entry, default)
    except _Unusable as error:
        level = logging.INFO if str(error) == "not tuned" else logging.WARNING
        log_once(__name__, level, f"{key} on {kind}: {error}; using the default tile sizes")
        return dict(default)
    return dict(default) | tuned


def save(key: str, device_kind: str, parameters: Mapping[str, int], *, source: str, **facts):
    """Writes an entry to `tuned.json`; `facts` record how it was chosen."""
    if source not in SOURCES:
        raise ValueError(f"source = {source!r}: must be one of {', '.join(SOURCES)}")
    everything = json.loads(FILE.read_text()) if FILE.exists() else {}
    entry = {"parameters": dict(parameters), "source": source} | facts
    everything.setdefault(device_kind, {})[key] = entry
    text = json.dumps(everything, indent=1, sort_keys=True) + "\n"
    write_atomically(epath.Path(FILE), text)
    _read.cache_clear()


class _Unusable(Exception):
    """No entry can be used; the message is the reason."""


@functools.cache
def _read(file: pathlib.Path):
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        return error


def _entries(file: pathlib.Path, device_kind: str) -> Mapping:
    content = _read(file)
    if isinstance(content, Exception):
        raise _Unusable(f"{file.name} cannot be read ({content})")
    entries = content.get(device_kind, {}) if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise _Unusable(f"{file.name} is not a table of entries by device kind")
    return entries


def _nearest(entries: Mapping, key: str):
    """Returns the entry of equal sizes with the largest batch, then length, within the key's."""
    sizes, batch, length = _split(key)
    fitting = {}
    for other in entries:
        other_sizes, b, s = _split(other)
        if other_sizes == sizes and b <= batch and s <= length:
            fitting[b, s] = entries[other]
    if not fitting:
        raise _Unusable("not tuned")
    return fitting[max(fitting)]


def _split(key: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"(.+)-B(\d+)-S(\d+)", key)
    return (match[1], int(match[2]), int(match[3])) if match else (key, 0, 0)


def _checked(entry, default: Mapping[str, int]) -> Mapping[str, int]:
    tuned = entry.get("parameters") if isinstance(entry, dict) else None
    if not isinstance(tuned, dict) or not tuned:
        raise _Unusable("its entry has no parameters")
    for name, value in tuned.items():
        if name not in default:
            raise _Unusable(f"its entry has {name!r}, which is none of {', '.join(default)}")
        if type(value) is not int or value < 1:
            raise _Unusable(f"its entry has {name} = {value!r}, which is not a positive integer")
    return tuned
