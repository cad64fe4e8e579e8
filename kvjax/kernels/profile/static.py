"""Rows and tables from compilers for absent devices: schedules of TPUs, resources of GPUs.

Every row is static: nothing ran.
"""

import argparse
from collections.abc import Sequence
import functools
import importlib

from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.output import Table
from kvjax.hardware import datasheets
from kvjax.kernels.decode_attention import shapes, tuning
from kvjax.kernels.profile import measured, tpu_static


def tpu(options: argparse.Namespace) -> list[dict]:
    """Returns rows of the bundles that an absent TPU would execute, with default tile sizes.

    Each row also has a linear fit through the two tile sizes of `options.blocks`: a tile of b
    tokens costs `bundles_per_block` + b · `bundles_in_a_block`.
    """
    chip, rows = tpu_static.CHIPS[options.device], []
    small, large = options.blocks  # tile sizes
    for mechanism in options.mechanisms:
        num_bytes = shapes.bytes_per_token(
            shapes.SHAPES[options.model][mechanism], tpu_static.DTYPE
        )
        row = dict(mechanism=mechanism, static=True, bytes=num_bytes)
        per_token = functools.partial(tpu_static.per_token, chip, options.model, mechanism)
        try:
            default = per_token()
        except (NotImplementedError, tpu_static.DoesNotCompile) as error:
            rows.append(row | dict(why=str(error)))
            continue
        hbm = chip.hbm_cycles(num_bytes)
        row |= dict(bundles=default.bundles, hbm_cycles=hbm, of_hbm=default.bundles / hbm)
        row |= dict(bandwidth_bound=default.bundles < hbm, units=default.units)
        try:
            at_small, at_large = (per_token(tile_kv=size).bundles for size in (small, large))
            per_tile = (at_small - at_large) * small * large / (large - small)
            row |= dict(blocks=options.blocks, bundles_per_block=per_tile)
            row |= dict(bundles_in_a_block=at_large - per_tile / large)
        except (NotImplementedError, tpu_static.DoesNotCompile) as error:
            row |= dict(without_blocks=str(error))
        rows.append(row)
    return rows


def tune_tpu(options: argparse.Namespace) -> list[dict]:
    """Saves the tile sizes with the fewest bundles per token, as entries of the smallest length."""
    chip, rows = tpu_static.CHIPS[options.device], []
    for mechanism in options.mechanisms:
        costs, why = {}, ""
        shape = shapes.SHAPES[options.model][mechanism]
        smallest = dict(
            batch=1, length=min(length for _, length in options.points), dtype=tpu_static.DTYPE
        )
        arguments = shapes.abstract(shape, **smallest)
        for sizes in measured.candidates("tpu", *arguments):
            try:
                cost = tpu_static.per_token(chip, options.model, mechanism, **sizes)
                costs[tuple(sizes.items())] = cost.bundles
            except (NotImplementedError, tpu_static.DoesNotCompile) as error:
                why = why or str(error)
        if not costs:
            rows.append(dict(mechanism=mechanism, why=why))
            continue
        best = min(costs, key=costs.get)
        facts = dict(bundles_per_token=costs[best], by_default=costs.get(()), tried=len(costs))
        if not best:
            rows.append(dict(mechanism=mechanism, why=measured.NOTHING_FASTER) | facts)
            continue
        key = tuning.key("tpu", *arguments)
        kind = next(kind for kind, name in datasheets.TPU_KINDS.items() if name == chip.name)
        tuning.save(key, kind, dict(best), source="static", **facts)
        rows.append(dict(mechanism=mechanism, key=key, parameters=dict(best)) | facts)
    return rows


def tpu_table(chip: tpu_static.Chip, rows: Sequence[dict]) -> Table:
    """Returns a table of executed bundles against HBM cycles, and of each busy unit's cycles."""
    cycles = [r["units"] for r in rows if "units" in r]
    units = [unit for unit in (cycles or [()])[0] if any(r[unit] >= 0.005 for r in cycles)]
    header = ["mechanism", "bytes", "bundles", "HBM cycles", "bundles / HBM"]
    header += ["bandwidth-bound", *units, "marginal bundles", "bundles per tile"]
    title = (
        f"static, {chip.name}: bundles that its schedule executes; nothing ran. Per cached token "
        f"and core ({chip.cores} at {chip.clock / 1e9:.2f} GHz share HBM); cycles of each unit "
        "alone. A longer tile adds the marginal bundles per token"
    )
    cells = [_tpu_cells(r, units, len(header)) for r in rows]
    return Table(title, header, cells, _why(rows))


def _tpu_cells(r: dict, units: Sequence[str], count: int) -> list[str]:
    if "why" in r:
        return [r["mechanism"], *["-"] * (count - 1)]
    slack = r["hbm_cycles"] / r["bundles"]
    bound = f"yes, by {slack:.2f}x" if slack > 1 else f"no, {1 / slack:.2f}x over"
    cells = [r["mechanism"], f"{r['bytes']:,}", f"{r['bundles']:.2f}"]
    cells += [f"{r['hbm_cycles']:.2f}", f"{r['of_hbm']:.0%}", bound]
    cells += [f"{r['units'][unit]:.2f}" for unit in units]
    grows = "bundles_per_block" in r
    cells += [f"{r['bundles_in_a_block']:.2f}" if grows else ""]
    return [*cells, f"{r['bundles_per_block']:,.0f}" if grows else ""]


def _why(rows: Sequence[dict]) -> list[str]:
    """Returns the reasons why rows have no figures."""
    return list(dict.fromkeys(f"{r['mechanism']}: {r['why']}" for r in rows if "why" in r))


def gpu(options: argparse.Namespace) -> list[dict]:
    """Returns rows of registers, spills and shared memory, from the compiler of an absent GPU."""
    try:
        gpu_static = importlib.import_module("kvjax.kernels.profile.gpu_static")
    except ImportError as error:
        raise UserError(
            f"--device={options.device}: its compiler is not installed ({error})"
        ) from error
    rows = []
    for mechanism in options.mechanisms:
        shape = shapes.SHAPES[options.model][mechanism]
        for batch, length in options.points:
            row = dict(mechanism=mechanism, static=True, batch=batch, length=length)
            try:
                figures = gpu_static.resources(
                    shape, batch=batch, length=length, device=options.device
                )
            except UserError:
                raise
            except Exception as error:  # a shape that the compiler refuses is a row
                figures = dict(why=first_line(error))
            rows.append(row | figures)
    return rows


def gpu_table(device: str, rows: Sequence[dict]) -> Table:
    """Returns a table of registers, spills and shared memory."""
    keys = ("registers", "spill_bytes", "shared_bytes")
    cells = [
        (
            r["mechanism"],
            r["batch"],
            f"{r['length']:,}",
            *(f"{r[k]:,}" if k in r else "-" for k in keys),
        )
        for r in rows
    ]
    header = ["mechanism", "batch", "tokens", "registers", "spilled bytes", "shared bytes"]
    title = f"static, {device}: what the compiler reserves; nothing ran"
    return Table(title, header, cells, _why(rows))
