"""Sizes of the GPU kernel: the slabs that one program reads, their roles, and its memory.

A program attends for a head tile: k of the K KV heads, with r = N / K query heads each. There are
g = K / k head tiles. A program's queries form a matrix [channels, columns]: a row per channel that
it reads, a column per query head, zero where the channels belong to another head.
"""

import dataclasses

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.gpu.ring import ROWS, Slab

# Tokens of a tile: 64 or 128, the rows of wgmma's scores. Everything else follows: slots
# [64, tile_kv] and their number (`slots`), registers (`Plan.registers`), lengths of splits.
TILE_KV = 128  # with 64, MHA takes 10 % longer and LRKV without RoPE 5 % (H200, 8 x 32K, d36)
# With 128, MLA at d36 would need 192 registers, above MOST_REGISTERS, and find no shared memory for
# its ring.
LATENT_TILE_KV = 64
# LRKV under RoPE: while queries are rotated, slots [64, tile_kv] hold the RoPE basis in pieces of
# [64, 64], and `kernel.attend` raises for other tiles. With 128 here, LRKV at d12 and d36 would
# need 176 registers, above MOST_REGISTERS: `attention.check`, which comes first, would refuse them
# and XLA run. A multiprocessor would also hold one program instead of two.
ROTATED_TILE_KV = ROWS
_SHARED_BYTES = 228 * 1024  # of a multiprocessor; CUDA reserves 1 KiB more per program
_OTHER_BYTES = 3 * 1024  # per program: barriers, and the scratch of reductions over warps
# Measured on an H200, 8 x 32K tokens, d36: LRKV takes 415, 404 and 407 us with 1, 2 and 3 products
# in flight, MLA 168, 161 and 158 us, but spills with 3. Other mechanisms gain less than 1 %; LRKV x
# GQA has not been timed since each of its query heads became a product of its own.
# (experiments/results/kernels/h200_decode_attention_variants.json)
WGMMA_IN_FLIGHT = 2
# (programs per multiprocessor, minimum tokens of a split): 2 programs if their splits then have
# 256 tokens or more, and up to 8 if splits still have 1,024. Longer splits are better, because each
# waits for its first slabs and rotates its queries.
_PROGRAMS = ((2, 256), (8, 1024))
# The largest `Plan.registers` that compiles without spills where H = 128 and R = 64.
MOST_REGISTERS = 170


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors of scores or softmax weights by token, cached as [B, rows, S] float32.

    "key_scale" is of keys that are normed. "NAME.scale" is of the int8 field NAME: a score is
    multiplied by its key's scale, and a softmax weight by its value's.
    """

    name: str
    heads: int  # rows of a program: as many of its query heads, in order, share each
    sharing: int = 1  # neighbouring programs that read the same rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Slabs that one program reads, and their roles; `kernel.attend` names the arrays.

    Attributes:
      keys: slabs that are multiplied with a query.
      rotated: slabs of residual keys' latents, multiplied with queries in rank space, which depend
        on the position.
      values: slabs of values, or the first of `keys`, which then serve as both.
      columns: query heads of a program, padded to a multiple of 8.
      heads: KV heads of a program.
      group_size: query heads of each KV head.
      scale: factor of the scores.
      scales: of keys that are normed, and of fields in int8.
      basis_slots: ring slots that hold the RoPE basis while the queries are rotated.
      own_expand: True if "expand" has rows for every slab of `rotated` and query head; False: for
        every slab, which its query heads share.
    """

    keys: tuple[Slab, ...]
    rotated: tuple[Slab, ...] = ()
    values: tuple[Slab, ...]
    columns: int
    heads: int
    group_size: int
    scale: float
    scales: tuple[Scales, ...] = ()
    basis_slots: int = 0
    own_expand: bool = False

    @property
    def order(self) -> tuple[Slab, ...]:
        """Slabs of a tile in the order in which they are read."""
        return self.keys + self.rotated + (() if self.keys_reused_as_values else self.values)

    @property
    def is_int8(self) -> bool:
        return any(self.itemsize(slab) == 1 for slab in self.order)

    @property
    def kept(self) -> tuple[Slab, ...]:
        """Slabs in bfloat16 beside slabs in int8: the last keys (decoupled RoPE keys)."""
        return tuple(slab for slab in self.order if self.itemsize(slab) == 2 and self.is_int8)

    @property
    def keys_by_field(self) -> tuple[range, ...]:
        """Indices of `keys`, for each field."""
        names = [slab.name for slab in self.keys]
        firsts = [i for i, name in enumerate(names) if name not in names[:i]]
        return tuple(map(range, firsts, [*firsts[1:], len(names)]))

    @property
    def in_ring(self) -> tuple[Slab, ...]:
        """Slabs of a tile that the ring of Hopper's kernel holds, in order."""
        return tuple(slab for slab in self.order if slab not in self.kept)

    def staged(self, wgmma_in_flight: int) -> int:
        """Returns the slabs in bfloat16 that Hopper's kernel casts slabs in int8 to; 0: none."""
        if not self.is_int8:
            return 0
        return max(wgmma_in_flight, self.basis_slots, self.keys_reused_as_values)

    @property
    def scales_of_values(self) -> tuple[str, ...]:
        """Names of the values' scales: of fields in int8, whose softmax weights differ by them."""
        return tuple(dict.fromkeys(f"{slab.name}.scale" for slab in self.values if self.is_int8))

    def scales_of(self, name: str) -> Scales | None:
        """Returns the scales of this name; None if there are none."""
        return next((scales for scales in self.scales if scales.name == name), None)

    @property
    def rows_of_scales(self) -> int:
        return sum(scales.heads for scales in self.scales)

    def row_of_scales(self, name: str) -> int:
        """Returns the first of these scales' rows among all rows of a program's scales."""
        names = [scales.name for scales in self.scales]
        return sum(scales.heads for scales in self.scales[: names.index(name)])

    def itemsize(self, slab: Slab) -> int:
        """Returns the bytes of a cached number: 1 in int8, 2 in bfloat16."""
        return 1 if self.scales_of(f"{slab.name}.scale") else 2

    @property
    def keys_reused_as_values(self) -> int:
        """Number of key slabs that are values too: they keep their slots until both are done."""
        return len(self.values) if self.keys[: len(self.values)] == self.values else 0

    @property
    def fewest_slots(self) -> int:
        """The smallest ring that makes progress.

        One slot must load while the basis is held, and all keys that are values are held at once.
        Slabs in int8 leave it before they are used, and the basis is where they are cast to.
        """
        if self.is_int8:
            return 3
        return max(3, self.basis_slots + 1, len(self.keys) if self.keys_reused_as_values else 0)

    def registers(self, tile_kv: int) -> int:
        """Estimates the registers, of a thread's 255, of outputs, scores and weights.

        A float32 accumulator [64, columns] takes columns / 2 registers in each of 128 threads.
        """
        rotated = WGMMA_IN_FLIGHT * tile_kv // 2 if self.rotated else 0
        return self.columns // 2 * (len(self.values) + 2 * tile_kv // ROWS) + rotated


def default_split(programs: int, S: int, tile_kv: int, multiprocessors: int) -> int:
    """Returns the tokens of a split with which the grid fills the GPU.

    Args:
      programs: programs per split, sequences times head tiles.
    """
    splits = max(
        min(-(-target * multiprocessors // programs), S // tokens) for target, tokens in _PROGRAMS
    )
    return -(-S // (max(splits, 1) * tile_kv)) * tile_kv


def slots(plan: Plan, tile_kv: int) -> int:
    """Returns the number of ring slots that fit into shared memory; 0 if too few do.

    Two programs share a multiprocessor if the ring still makes progress in half its memory.
    """
    staged, weights = plan.staged(WGMMA_IN_FLIGHT), len(plan.scales_of_values) or 1
    buffers = [
        2 * ROWS * plan.columns * len(plan.keys),  # queries, bfloat16
        2 * plan.columns * tile_kv * weights,  # weights, bfloat16
        2 * ROWS * tile_kv * (staged + 2 * len(plan.kept)),  # slabs beside the ring, bfloat16
        2 * ROWS * ROWS * len(plan.rotated) * plan.group_size,  # rank_queries, bfloat16
        4 * 2 * plan.rows_of_scales * tile_kv,  # scales, float32, double-buffered
    ]
    fixed = sum(round_up(size, 1024) for size in buffers) + _OTHER_BYTES
    for programs in (2, 1):  # per multiprocessor
        slot = ROWS * tile_kv * plan.itemsize(plan.order[0])
        count = (_SHARED_BYTES // programs - 1024 - fixed) // slot
        if count > plan.fewest_slots:
            return count
    return 0  # `attention.check` refuses the shapes
