"""Placement of tokens and arrays on devices, shared by implementations of softmax attention.

Context parallelism shards T over the mesh's `sequence` axis. With tokens in order the last device
would have nearly twice the mean causal work; `zigzag` gives every device an early and a late chunk.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from kvjax.foundation.errors import UserError
from kvjax.foundation.rounding import round_up

# Name of the residuals of a kernel's forward pass. `jax.checkpoint` with the policy
# `save_only_these_names(RESIDUALS)` saves them and does not repeat the forward pass.
RESIDUALS = "softmax_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of an implementation besides queries, keys and values; see `api`."""

    causal: bool
    window: int  # 0: none
    scale: float
    softcap: float  # 0: none
    query_chunk: int
    query_positions_T: np.ndarray | None  # None: 0..T-1
    key_positions_S: np.ndarray | None
    query_segment_ids_BT: jax.Array | None
    segment_ids_BS: jax.Array | None
    mesh: jax.sharding.Mesh | None


def refuse_arrays(name: str, reason: str) -> NoReturn:
    """Raises NotImplementedError with the reason why an implementation does not support arrays."""
    raise NotImplementedError(f"{name} attention: {reason}; the implementation 'xla' supports them")


# -- tokens ----------------------------------------------------------------------------------------


def zigzag(length: int, shards: int) -> np.ndarray:
    """Returns the position, [length] int32, of the token at each index of a sharded row.

    The row is cut into 2·shards chunks; device i has chunks i and 2·shards - 1 - i, as in Llama 3
    (arXiv:2407.21783, section 3.3.2), so that causal attention is equal work on all devices.

    Raises:
      UserError: 2·shards does not divide the length.
    """
    chunks = 2 * shards
    if length % chunks:
        below = length // chunks * chunks
        near = f"{below} or {below + chunks}" if below else f"{chunks}"
        raise UserError(
            f"config.mesh.sequence = {shards} cuts rows in {chunks} chunks, two per device, and "
            f"{length} tokens are not divided by {chunks}; the nearest length is {near}"
        )
    positions = np.arange(length, dtype=np.int32).reshape(chunks, -1)
    order = [chunk for i in range(shards) for chunk in (i, chunks - 1 - i)]
    return positions[order].reshape(-1)


def sort_tokens(positions_S: np.ndarray | None, x_BS: jax.Array) -> jax.Array:
    """Sorts tokens [B, S, ..] by position, with one slice for each run of consecutive positions."""
    if positions_S is None:
        return x_BS
    index = np.argsort(positions_S)
    starts = np.flatnonzero(np.diff(index, prepend=index[0] - 2) != 1)
    runs = zip(index[starts], np.diff(starts, append=len(index)), strict=True)
    slices = [jax.lax.slice_in_dim(x_BS, int(i), int(i + length), axis=1) for i, length in runs]
    return jnp.concatenate(slices, axis=1)


def all_positions(options: Options, T: int, S: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of queries, [T], and keys, [S], in the row, int32."""
    query_positions, key_positions = options.query_positions_T, options.key_positions_S
    return (
        np.arange(T, dtype=np.int32) if query_positions is None else query_positions,
        np.arange(S, dtype=np.int32) if key_positions is None else key_positions,
    )


# -- devices ---------------------------------------------------------------------------------------


def platform(mesh: jax.sharding.Mesh | None) -> str:
    """Returns the platform of the devices compiled for: "cpu", "gpu" or "tpu"."""
    if mesh is not None:
        return mesh.devices.flat[0].platform
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).platform


def num_shards(mesh: jax.sharding.Mesh | None, *names: str) -> int:
    """Returns the number of shards of an array that is sharded over the named mesh axes."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in names)


def check_division(name: str, q_BTNH, k_BSKH, mesh: jax.sharding.Mesh | None) -> None:
    """Raises NotImplementedError if the mesh does not divide the batch or the heads."""
    (B, N), K = q_BTNH.shape[:3:2], k_BSKH.shape[2]
    rows, tensor = num_shards(mesh, "data", "fsdp"), num_shards(mesh, "tensor")
    if B % rows:
        refuse_arrays(name, f"a batch of {B} is not divided by data x fsdp = {rows} devices")
    if N % tensor or (K % tensor and tensor % K):
        heads = f"{N} query heads on {K} KV heads"
        refuse_arrays(name, f"{heads} are not divided by tensor = {tensor} devices")


def on_every_device(
    attend: Callable[..., jax.Array], q_BTNH, k_BSKH, v_BSKV, options: Options, first=(), specs=()
) -> jax.Array:
    """Calls attend(*first, q, k, v, query_segment_ids, segment_ids) on each device: [B, T, N, Hv].

    A device has its shards of the batch, of T and of the heads. If there are fewer KV heads than
    `tensor` devices, each device has a copy of the head that its queries use. Without a mesh of
    several devices `attend` gets the full arrays.

    Args:
      first, specs: leading arguments of `attend`, and their partition specs.
    """
    mesh, segments = options.mesh, (options.query_segment_ids_BT, options.segment_ids_BS)
    if mesh is None or mesh.size == 1:
        return attend(*first, q_BTNH, k_BSKH, v_BSKV, *segments)
    tensor, K = num_shards(mesh, "tensor"), k_BSKH.shape[2]
    if K % tensor:
        k_BSKH, v_BSKV = (jnp.repeat(x, tensor // K, axis=2) for x in (k_BSKH, v_BSKV))

    def axis(name):
        return name if name in mesh.axis_names else None

    batch = tuple(name for name in ("data", "fsdp") if name in mesh.axis_names) or None
    queries, keys = P(batch, axis("sequence"), axis("tensor")), P(batch, None, axis("tensor"))
    if k_BSKH.shape[0] > q_BTNH.shape[0]:
        keys = P(("sequence", *(batch or ())), None, axis("tensor"))
    rows = (None, None) if segments[1] is None else (P(batch, axis("sequence")), P(batch))
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(*specs, queries, keys, keys, *rows),
        out_specs=queries,
        check_vma=False,  # a kernel's outputs do not declare the axes along which they vary
    )(*first, q_BTNH, k_BSKH, v_BSKV, *segments)


# -- shapes ----------------------------------------------------------------------------------------


def equal_dims(*arrays: jax.Array, multiple: int = 1) -> list[jax.Array]:
    """Pads last axes with zeros to one length, as libraries require."""
    dim = round_up(max(x.shape[-1] for x in arrays), multiple)
    missing = [dim - x.shape[-1] for x in arrays]
    return [
        jnp.pad(x, [(0, 0)] * 3 + [(0, n)]) if n else x
        for x, n in zip(arrays, missing, strict=True)
    ]
