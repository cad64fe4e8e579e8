"""Tile sizes by device kind and shape, from `tuned.json`, which the profiler writes.

    {"TPU v5 lite": {"tpu/residual_rotated/bfloat16-N18-K18-J1-R64-H128-V128-B1-S32768":
        {"parameters": {"tile_kv": 1024}, "source": "measured", ...}}}

If no entry has the batch and length, a TPU uses the entry of the next smaller batch, then length. A
GPU uses exact entries only (`nearest=False`), because the best split depends on the number of
programs that batch and length give. `source` is "measured", or "static" if the bundles of the
compiler's schedule were counted without running the kernel.
"""

from collections.abc import Mapping
import functools
import json
import logging
import math
import pathlib

from etils import epath
import jax

from kvjax.foundation.files import write_atomically
from kvjax.foundation.logs import log_once
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs

FILE = pathlib.Path(__file__).with_name("tuned.json")


def current_device_kind() -> str:
    """Returns the kind of the device compiled for; by default the first device's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device or jax.devices()[0]).device_kind


def key(implementation: str, inputs: DecodeInputs, cache: Mapping[str, jax.Array]) -> str:
    """Returns an entry's key: implementation, cache layout, dtype, sizes, batch, capacity."""
    sizes = dict(N=inputs.query.shape[2])
    for letter, name, axis in (
        ("K", "base_key", 1),
        ("H", "base_key", 2),
        ("V", "base_value", 2),
        ("C", "latent", -2),
        ("P", "rope_key", 1),
        ("R", "residual_key", 2),
        ("J", "key", 1),
        ("H", "key", 2),
        ("K", "value", 1),
        ("V", "value", 2),
    ):
        if name in cache:
            sizes[letter] = cache[name].shape[axis]
    if "residual_key" in cache:
        sizes |= dict(J=sizes["K"], K=cache["residual_key"].shape[1])
    if "latent" in cache and cache["latent"].ndim > 3:
        sizes["J"] = math.prod(cache["latent"].shape[1:-2])
    array = next(iter(cache.values()))
    dims = [f"{letter}{sizes[letter]}" for letter in "NKJRHVCP" if letter in sizes]
    dims = [str(array.dtype), *dims]
    dims += [f"B{array.shape[0]}", f"S{array.shape[-1]}"]
    return f"{implementation}/{inputs.kind(cache)}/{'-'.join(dims)}"


def parameters(key: str, *, default: Mapping[str, int], nearest: bool) -> dict[str, int]:
    """Returns the tuned parameters under a key; without an entry, logs that and returns `default`.

    Args:
      key: see `key`.
      default: a value for every parameter of the implementation.
      nearest: True to accept the entry of the nearest smaller batch, then length.
    """
    kind = current_device_kind()
    entries = _read(FILE).get(kind, {})
    entry = _nearest(entries, key) if nearest else entries.get(key)
    if entry is None:
        log_once(__name__, logging.INFO, f"{key} on {kind}: not tuned; using default tile sizes")
        return dict(default)
    return {name: entry["parameters"].get(name, value) for name, value in default.items()}


def save(key: str, device_kind: str, parameters: Mapping[str, int], *, source: str, **facts):
    """Writes an entry to `tuned.json`.

    Args:
      source: "measured" or "static".
      facts: results to store in the entry, such as microseconds.
    """
    kinds = json.loads(FILE.read_text())
    entry = {"parameters": dict(parameters), "source": source} | facts
    kinds.setdefault(device_kind, {})[key] = entry
    text = json.dumps(kinds, indent=1, sort_keys=True) + "\n"
    write_atomically(epath.Path(FILE), text)
    _read.cache_clear()


@functools.cache
def _read(file: pathlib.Path) -> dict:
    return json.loads(file.read_text())


def _nearest(entries: Mapping, key: str) -> Mapping | None:
    """Returns the entry of equal sizes with the largest batch, then length, up to the key's."""
    sizes, batch, length = _split(key)
    by_batch_and_length = {}
    for entry_key, entry in entries.items():
        entry_sizes, b, s = _split(entry_key)
        if entry_sizes == sizes and b <= batch and s <= length:
            by_batch_and_length[b, s] = entry
    return by_batch_and_length[max(by_batch_and_length)] if by_batch_and_length else None


def _split(key: str) -> tuple[str, int, int]:
    """Splits a key into sizes, batch and length."""
    sizes, batch, length = key.rsplit("-", 2)
    return sizes, int(batch[1:]), int(length[1:])
