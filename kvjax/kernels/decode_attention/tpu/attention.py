"""Decode attention as Pallas kernels for TPUs: one query per sequence over a cache of any length.

A mechanism's kernel is a list of parts (`parts`) on one pipeline (`pipeline`). Tests compile it
ahead of time for v4, v5e, v5p and v6e, and run it by the interpreter.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.cache.stripes import Stripes
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.readings import GroupedReading
from kvjax.kernels.decode_attention.readings import LatentReading
from kvjax.kernels.decode_attention.readings import Reading
from kvjax.kernels.decode_attention.readings import ResidualReading
from kvjax.kernels.decode_attention.readings import latent as latent_lib
from kvjax.kernels.decode_attention.tpu import parts as parts_lib
from kvjax.kernels.decode_attention.tpu.part import LANES
from kvjax.kernels.decode_attention.tpu.part import Part
from kvjax.kernels.decode_attention.tpu.pipeline import attend
from kvjax.kernels.decode_attention.tpu.pipeline import vmem_bytes

Cache = Mapping[str, jax.Array]
CANDIDATES = dict(block=(512, 1024, 2048), scored=(256, 512), splits=(1, 2))  # for tuning
VALUES = ("vector", "diagonal")  # how values of a head's own are weighed, see `parts`


@dataclasses.dataclass(frozen=True)
class _Chip:
    """What the defaults depend on."""

    vmem_bytes: int = 16 * 2**20
    cores: int = 1  # that share its memory
    values: str = "vector"


_LARGE = 64 * 2**20
_CHIPS = {
    "TPU v4": _Chip(cores=2, values="diagonal"),  # few vector units
    "TPU v5": _Chip(vmem_bytes=_LARGE, cores=2),  # v5p
    "TPU v5p": _Chip(vmem_bytes=_LARGE, cores=2),
    "TPU v5 lite": _Chip(vmem_bytes=_LARGE),
    "TPU v5e": _Chip(vmem_bytes=_LARGE),
    "TPU v6 lite": _Chip(vmem_bytes=_LARGE),
    "TPU v6e": _Chip(vmem_bytes=_LARGE),
    "cpu": _Chip(vmem_bytes=_LARGE),  # the interpreter
}


def decode_attention(operands: Reading, cache: Cache, first_B: jax.Array, **options) -> jax.Array:
    """See `api.decode_attention`: [B, 1, N, Hv] in float32; options are those of `partial`."""
    return partial(operands, cache, first_B, Stripes(), **options)[0]


def partial(
    operands: Reading,
    cache: Cache,
    first_B: jax.Array,
    held: Stripes,
    *,
    block: int | None = None,
    scored: int | None = None,
    splits: int | None = None,
    values: str | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the tokens that are held here: [B, 1, N, Hv], and log-sum-exps [B, 1, N].

    Where a query sees none of them, its output is finite and its log-sum-exp -inf.

    Args:
      first_B: position of each sequence's new token, whoever holds it.
      block: tokens per grid step, rounded down to a divisor of the capacity; None, here and below:
        what `tuned.json` has, or a default.
      scored: tokens of a block that are scored at once, rounded down to a divisor of the block.
      splits: pieces that a sequence is cut into, for a chip with two cores.
      values: one of `VALUES`.
      interpret: False, or `pltpu.InterpretParams`.

    Raises:
      NotImplementedError: operands or shapes that this kernel does not take, and which it does.
    """
    check(operands, cache)
    S, chip = _capacity(cache), _chip()
    default = _default_sizes(operands, cache)
    sizes = tuning.parameters(tuning.key("tpu", operands, cache), default=default)
    block = block or sizes["block"]
    origins = None
    if held.chips == 1:
        block = _divisor(S, block)
    else:  # a block's positions are consecutive
        block = _divisor(held.size, block)
        origins = held.position(jnp.arange(S // block, dtype=jnp.int32) * block)
    seen_B = held.held(first_B + 1)
    o_B1NV, log_sum_exp_B1N = _run(
        operands,
        dict(cache),
        jnp.clip(seen_B - 1, 0, S - 1),  # a full cache's sequence that grows no more has S
        origins,
        block=block,
        scored=_divisor(block, scored or sizes["scored"]),
        splits=splits or sizes["splits"],
        values=values or chip.values,
        vmem_bytes=chip.vmem_bytes,
        interpret=interpret,
    )
    # The kernel reads one slot at least; where there is none, it counts for nothing.
    return o_B1NV, jnp.where(seen_B[:, None, None] > 0, log_sum_exp_B1N, -jnp.inf)


@functools.partial(
    jax.jit, static_argnames=("block", "scored", "splits", "values", "vmem_bytes", "interpret")
)  # a function of its own in the program: lowered once for all layers of a model
def _run(operands, cache, first_B, origins, *, block, values, **options):
    plan = _plan(operands, cache, block, values, origins)
    outputs, log_sum_exp_BN = attend(
        plan.parts,
        first_B,
        heads=operands.query.shape[2],
        capacity=_capacity(cache),
        scale=operands.scale,
        key_scale=cache.get("key_scale"),
        block=block,
        lag=plan.lag,
        **options,
    )
    return plan.expand(*outputs)[:, None], log_sum_exp_BN[:, None]


def check(operands: Reading, cache: Cache) -> None:
    """Raises the NotImplementedError of `decode_attention`, if there is one."""

    def refuse(takes: str, here: str) -> None:
        raise NotImplementedError(f"the TPU kernels take {takes}, not {here}: use 'xla'")

    if type(operands) not in _PLANS:
        refuse("grouped, residual and latent caches", f"{operands.kind(cache)}")
    if operands.bias is not None:
        refuse("logits without a bias by position", "one")
    if operands.query.shape[1] != 1:
        refuse("one query per sequence", f"T = {operands.query.shape[1]}")
    if operands.query.shape[2] > LANES:
        refuse(f"up to {LANES} heads", f"N = {operands.query.shape[2]}")
    for name, array in cache.items():
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            refuse("caches in bfloat16 or float32", f"{name} in {array.dtype}")
        if array.shape[-1] % LANES:
            refuse(f"capacities in multiples of {LANES}", f"S = {array.shape[-1]}")
        if name != "key_scale" and array.shape[-2] % 16:
            refuse("head dims and ranks in multiples of 16", f"{array.shape[-2]} of {name}")
    if operands.rope_base is not None and operands.query.shape[-1] % LANES:
        refuse(f"rotated keys of a multiple of {LANES} channels", f"H = {operands.query.shape[-1]}")
    if jax.config.jax_enable_x64:
        refuse("32-bit programs", "one with jax_enable_x64")
    need, there = _vmem_bytes(operands, cache, LANES, LANES), _chip().vmem_bytes
    if need > there:
        refuse(f"what fits {there / 2**20:.0f} MiB of VMEM", f"{need / 2**20:.1f} MiB")


def _capacity(cache: Cache) -> int:
    return next(iter(cache.values())).shape[-1]


def _chip() -> _Chip:
    return _CHIPS.get(tuning.current_device_kind(), _Chip())


def _vmem_bytes(operands: Reading, cache: Cache, block: int, scored: int) -> int:
    """What the kernel takes of VMEM with these sizes, from shapes alone."""
    taken = []

    def measure(operands: Reading, cache: Cache) -> None:
        plan = _plan(operands, cache, block, _chip().values)
        sizes = dict(block=block, scored=scored, key_scale=cache.get("key_scale"))
        taken.append(vmem_bytes(plan.parts, heads=operands.query.shape[2], **sizes))

    jax.eval_shape(measure, operands, dict(cache))
    return taken[0]


def _default_sizes(operands: Reading, cache: Cache) -> dict[str, int]:
    """A block is an eighth of the capacity and within 512 and 2,048 tokens; a split per core.

    Less where that does not fit VMEM. What a block costs besides its tokens is 250 to 700 bundles
    (`kvjax.kernels.profile`); but all of a sequence's last block is read.
    """
    S, chip = _capacity(cache), _chip()
    block, scored = _divisor(S, min(2048, max(512, S // 8))), 512
    while _vmem_bytes(operands, cache, block, scored) > chip.vmem_bytes:
        if block == scored == LANES:
            break  # `check` refuses
        if scored > 256 or (block <= 512 and scored > LANES):
            scored //= 2
        else:
            block = _divisor(S, max(block // 2, LANES))
    B = next(iter(cache.values())).shape[0]
    return dict(block=block, scored=scored, splits=chip.cores if B == 1 else 1)


def _divisor(S: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that divides S, a multiple of 128; 128 at least."""
    most = max(min(most, S), LANES)
    return next(b for b in range(most // LANES * LANES, 0, -LANES) if S % b == 0)


# -- the mechanisms --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    parts: list[Part]
    expand: Callable[..., jax.Array]  # the parts' outputs [B, N, width] to [B, N, Hv]
    lag: bool = False


def _plan(operands: Reading, cache: Cache, block: int, values: str, origins=None) -> _Plan:
    """The plan for blocks that start at the positions `origins`; None: for a whole cache's."""
    return _PLANS[type(operands)](operands, cache, block, values, origins)


def _by_group(query_B1NH: jax.Array, K: int) -> jax.Array:
    B, _, N, H = query_B1NH.shape
    return query_B1NH.reshape(B, K, N // K, H)


def _values_of_heads(values_BKVS: jax.Array, N: int, how: str):
    if how == "diagonal" and N == values_BKVS.shape[1]:
        return parts_lib.DiagonalValues(values_BKVS)
    return parts_lib.VectorValues(values_BKVS, N=N)


def _grouped(o: GroupedReading, cache: Cache, block: int, values: str, origins) -> _Plan:
    del block, origins
    N, (K, V) = o.query.shape[2], cache["base_value"].shape[1:3]
    if N == K:
        part = Part(
            parts_lib.VectorKeys(o.query[:, 0], cache["base_key"]),
            _values_of_heads(cache["base_value"], N, values),
        )
    else:
        part = Part(
            parts_lib.MatrixKeys(_by_group(o.query, K), cache["base_key"]),
            parts_lib.MatrixValues(cache["base_value"], K=K, G=N // K, V=V),
        )
    return _Plan([part], lambda o_BNV: o_BNV)


def _latent(o: LatentReading, cache: Cache, block: int, values: str, origins) -> _Plan:
    del block, values, origins
    N, latent_BGCS = o.query.shape[2], latent_lib.by_group(cache["latent"])
    G, C = latent_BGCS.shape[1:3]
    query_B1NC = latent_lib.with_zeros(o.query, C)
    content = Part(
        parts_lib.MatrixKeys(_by_group(query_B1NC, G), latent_BGCS),
        parts_lib.MatrixValues(None, K=G, G=N // G, V=C),
    )
    parts = [content]
    if o.rope_query is not None:
        rope_key = cache["rope_key"][:, None]
        parts.append(Part(parts_lib.MatrixKeys(_by_group(o.rope_query, 1), rope_key)))
    if o.up_value is None:
        return _Plan(parts, lambda o_BNC: o_BNC)
    up_GCnV = o.up_value.astype(jnp.float32)
    expand = lambda o_BNC: latent_lib.values(o_BNC[:, :, None], up_GCnV)[:, :, 0]
    return _Plan(parts, expand)


def _residual(o: ResidualReading, cache: Cache, block: int, values: str, origins) -> _Plan:
    B, _, N, _ = o.query.shape
    (J, V), (K, R) = cache["base_value"].shape[1:3], o.expand_key.shape[:2]
    base = Part(
        parts_lib.MatrixKeys(_by_group(o.query, J), cache["base_key"]),
        parts_lib.MatrixValues(cache["base_value"], K=J, G=N // J, V=V),
    )
    rotated = o.rope_base is not None
    if rotated:
        keys = parts_lib.RotatingKeys(
            o.residual_query[:, 0],
            o.expand_key,
            cache["residual_key"],
            base=o.rope_base,
            block=block,
            origins=origins,
        )
    else:  # LRKV eq. 3
        q_BKGH = _by_group(o.residual_query, K).astype(jnp.float32)
        u_BKGR = jnp.einsum("BKGH,KRH->BKGR", q_BKGH, o.expand_key.astype(jnp.float32))
        keys = parts_lib.VectorKeys(u_BKGR.reshape(B, N, R), cache["residual_key"])
    weighed = _values_of_heads(cache["residual_value"], N, values)

    def expand(base_BNV: jax.Array, latent_BNR: jax.Array) -> jax.Array:  # LRKV eq. 4
        latent_BKGR = latent_BNR.reshape(B, K, N // K, R)
        values_BKGV = jnp.einsum("BKGR,KRV->BKGV", latent_BKGR, o.expand_value.astype(jnp.float32))
        return base_BNV + values_BKGV.reshape(B, N, V)

    return _Plan([base, Part(keys, weighed)], expand, lag=rotated)


_PLANS = {GroupedReading: _grouped, LatentReading: _latent, ResidualReading: _residual}
