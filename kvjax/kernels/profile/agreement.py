"""Checks implementations of decode attention against its definition on the device present.

One sequence of a batch is full, the others have random lengths; slots after their ends hold
garbage 100 times as large as entries. The definition is `reference.decode_attention` in float32,
with the device's highest precision. Calls are repeated on the same arrays; results with different
bits reveal a race.
"""

from collections.abc import Callable, Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.output import Table
from kvjax.kernels.decode_attention import shapes
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.kernels.decode_attention.cache_layouts.layout import Sizes
from kvjax.kernels.profile import side_by_side
from kvjax.kernels.profile.measured import OnRow, Refusal, Run, result_or_reason

POINTS = ((1, 32_768), (8, 4096))  # (batch, length)
CPU_POINTS = ((1, 4096), (8, 512))
REPEATS = 10
# Relative to the output's largest entry: 1e-5 in float32, two units in the last place in bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2 * 2.0**-8}
_GARBAGE = 100  # factor of entries after a sequence's end
_DEFINITION = ""  # name of the definition among implementations


def check(run: Run, on_row: OnRow = lambda row: None) -> list[dict]:
    """Returns a row per point, mechanism and implementation; raises if the definition fails.

    A row has `error` (|o - exact| / |exact|, 2-norms), `worst` (largest difference over largest
    entry), `same` (True if all calls gave equal bits) and `agrees`. If an implementation refuses or
    fails, the row has the reason instead, `why`, and after a failure `agrees` = False.
    """
    rows = []
    for batch, length in run.points:
        found = side_by_side.compiled(programs(run, batch, length), run.load)
        for mechanism in run.mechanisms:
            arguments = problem(shapes.SHAPES[run.model][mechanism], batch, length, run.dtype)
            exact = found[mechanism, _DEFINITION, batch, length]()(*_wide(arguments))
            exact = np.asarray(exact, np.float64)
            for name in run.implementations:
                program = found[mechanism, name, batch, length]
                compare = functools.partial(_compare, program, arguments, exact, run.dtype)
                row = dict(mechanism=mechanism, implementation=name, batch=batch, length=length)
                result = result_or_reason(compare)
                if isinstance(result, Refusal):
                    result = dict(why=result)
                elif isinstance(result, str):
                    result = dict(why=result, agrees=False)
                rows.append(row | result)
                on_row(rows[-1])
    return rows


def programs(run: Run, batch: int, length: int) -> dict[tuple, Callable[[], side_by_side.Program]]:
    """Returns functions that make the programs of a point, by mechanism, implementation, point."""
    return {
        (mechanism, name, batch, length): functools.partial(
            _program, run, mechanism, name, batch, length
        )
        for mechanism in run.mechanisms
        for name in (_DEFINITION, *run.implementations)
    }


def problem(shape: Sizes, batch: int, length: int, dtype: jnp.dtype) -> tuple:
    """Returns inputs, cache, and first_B [B], the last slot of each sequence."""
    first_B = np.random.default_rng(0).integers(0, length, batch, np.int32)
    first_B[0] = length - 1
    reached_BS = np.arange(length)[None] <= first_B[:, None]

    @jax.jit
    def draw(reached_BS):
        sizes = dict(batch=batch, length=length, dtype=dtype)
        inputs, cache = shapes.problem(shape, **sizes)
        for field, x in cache.items():
            reached = reached_BS.reshape(batch, *(1,) * (x.ndim - 2), length)
            cache[field] = jnp.where(reached, x, _GARBAGE * x)
        return inputs, cache

    return *draw(reached_BS), jnp.asarray(first_B)


def _wide(arguments: tuple) -> tuple:
    def wide(x):  # packed int4 stays: the definition unpacks it
        return x if x.dtype == jnp.uint8 else x.astype(jnp.promote_types(x.dtype, jnp.float32))

    return jax.tree.map(wide, arguments)


def _program(run: Run, mechanism: str, name: str, batch: int, length: int) -> side_by_side.Program:
    shape = shapes.SHAPES[run.model][mechanism]
    arguments = jax.eval_shape(lambda: problem(shape, batch, length, run.dtype))
    if name == _DEFINITION:
        arguments = jax.eval_shape(_wide, arguments)
    return jax.jit(IMPLEMENTATIONS[name or "reference"]), arguments


def _compare(
    program: Callable[[], Callable], arguments: tuple, exact: np.ndarray, dtype: jnp.dtype
) -> dict:
    first, *repeated = (np.asarray(program()(*arguments)) for _ in range(REPEATS))
    if not np.isfinite(first).all():
        raise FloatingPointError("its output is not finite")
    difference = first.astype(np.float64) - exact
    worst = np.abs(difference).max() / np.abs(exact).max()
    same = all(first.tobytes() == other.tobytes() for other in repeated)
    return dict(
        error=float(np.linalg.norm(difference) / np.linalg.norm(exact)),
        worst=float(worst),
        same=same,
        agrees=bool(worst <= TOLERANCE[dtype.name] and same),
    )


def all_agree(rows: Sequence[dict]) -> bool:
    """Returns True if at least one implementation ran, and none was wrong or failed."""
    return any("worst" in r for r in rows) and all(r.get("agrees", True) for r in rows)


def table(rows: Sequence[dict], run: Run) -> Table:
    """Returns rows as a table, with reasons as notes."""
    tolerance = TOLERANCE[run.dtype.name]
    title = (
        f"{jax.devices()[0].device_kind}, {run.dtype}, {run.model}: against the definition in "
        f"float32. The worst difference may be {tolerance:.1e} of the largest entry; {REPEATS} "
        "calls must give the same bits"
    )
    header = ("mechanism", "by", "batch", "tokens", "error", "worst", "same bits", "agrees")
    cells, notes = [], []
    for r in rows:
        names = [r["mechanism"], r["implementation"], f"{r['batch']}", f"{r['length']:,}"]
        if "why" in r:
            notes.append(f"{names[0]} {names[1]}, {names[2]} x {names[3]}: {r['why']}")
            agrees = "NO" if "agrees" in r else "-"
            cells.append(names + ["-"] * (len(header) - len(names) - 1) + [agrees])
            continue
        flags = ["yes" if r[key] else "NO" for key in ("same", "agrees")]
        cells.append([*names, f"{r['error']:.1e}", f"{r['worst']:.1e}", *flags])
    return Table(title, header, cells, notes)
