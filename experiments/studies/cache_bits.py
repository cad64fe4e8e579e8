"""Compares mechanisms at equal cache bytes: fewer heads, a lower rank, or fewer bits?

    python -m experiments.studies.cache_bits [--seeds=3] [--mechanisms=mha,lrkv,mla] [--save]

Trains the models of `small_caches` (MHA's parameters, the same tokens in the same order) and
evaluates each over a cache in float32, int8 and int4, as `experiments.benchmarks.quantized` does.
Bytes are those of a bfloat16 model, whose rounding is not measured. Keys of `thin_keys` and
`factored` are too short for int4 and have int8 there (`kvjax/cache/quantized.py`). A second table
has int4 for keys alone and for values alone, with and without the change of basis. Differences are
between caches of the same run, or between runs of the same seed, with 95 % intervals (Student's t
over seeds).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

from etils import epath
import jax.numpy as jnp

from experiments.benchmarks import quantized as measured
from experiments.benchmarks.quantized import Cache
from experiments.studies import side_by_side, small_caches
from experiments.studies.demo_size import TOKENS_PER_STEP
from experiments.studies.grid import Cell, FinishedRuns, Run, matched
from experiments.studies.options import Parser, estimated, local_folder, shown
from kvjax.analysis.words import mechanism_names
from kvjax.attention import canonical
from kvjax.cache import quantized
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.intervals import difference, estimate

NAME = "cache_bits"
THIN = "thin_keys_16"  # keys of half the width: those of `thin_keys` are too short for int4
MECHANISMS = (*small_caches.OWN, THIN)
DTYPES = ("", *quantized.BITS)
_SHORT_KEYS = ("thin_keys", "factored")
PARTED = ("mha", "gqa", "mqa", "lrkv", THIN)  # with keys apart from values
PARTS, BASES = ("key", "value"), ("", "stored")
_POSITIONS, _ROWS = 256, 64  # 16,320 held-out tokens, in rows as long as those of training
_CACHES = (
    *(Cache(dtype) for dtype in DTYPES),
    *(Cache("int4", basis, part) for basis in BASES for part in PARTS),
)
_CODE = (measured.__file__, quantized.__file__, canonical.__file__)
_BF16 = jnp.dtype(jnp.bfloat16)


def cells(names: Sequence[str]) -> list[Cell]:
    """Returns the cells of these mechanisms, each with about as many parameters as MHA."""
    made = small_caches.cells([name for name in names if name != THIN])
    if THIN in names:
        (mha,) = small_caches.cells([small_caches.FIRST])
        count = formulas.parameters(Run(mha, 0, 1).experiment.model)["total"]
        file, width = small_caches.file_of("thin_keys"), {"attention.key_dim": 16}
        overrides = width | matched(file, count, width)
        made.append(Cell(THIN, file, overrides, small_caches.FIRST))
    few = {"train.eval_rows": 64}  # the study evaluates by itself
    return [dataclasses.replace(cell, overrides=cell.overrides | few) for cell in made]


def bits_per_byte(workdir: pathlib.Path) -> dict:
    """Returns a run's held-out bits per byte and share of equal greedy tokens by cache."""
    rows = measured.quality(epath.Path(workdir), _POSITIONS, _ROWS, _CACHES)
    keys = ("bits_per_byte", "same_token")
    found = zip(_CACHES, rows, strict=True)
    return dict(caches={_name(cache): {key: row[key] for key in keys} for cache, row in found})


def _name(cache: Cache) -> str:
    return "/".join(cache)


def _of(runs: Mapping[int, Mapping], cache: Cache, key: str = "bits_per_byte") -> dict[int, float]:
    """Returns a figure of a cell's runs by seed."""
    return {seed: run["caches"][_name(cache)][key] for seed, run in runs.items()}


def rows(finished: FinishedRuns) -> dict[str, list[dict]]:
    """Returns rows per mechanism and cache, and rows per mechanism, basis and part."""
    all_cells = cells([name for name in MECHANISMS if name in finished.runs])
    by_cell, whole, parts = finished.by_cell(all_cells), [], []
    reference = by_cell.get(small_caches.FIRST, {})
    for cell in all_cells:
        if not (runs := by_cell.get(cell.name)):
            continue
        model = Run(cell, 0, finished.steps).experiment.model
        wide = _of(runs, Cache(""))
        about = dict(mechanism=cell.name, kind=mechanism_names(model.mechanisms), seeds=len(runs))
        for dtype in DTYPES:
            bits = _of(runs, Cache(dtype))
            row = about | dict(cache_dtype=dtype)
            row["cache_bytes"] = formulas.cache_bytes_per_token(
                model, _BF16, quantized.bits_of(dtype)
            )
            row |= estimated("bpb", estimate(list(bits.values())))
            row |= estimated("worse", difference(bits, wide) if dtype else None)
            row |= estimated("against_mha", difference(bits, _of(reference, Cache(""))))
            same = estimate(list(_of(runs, Cache(dtype), "same_token").values()))
            whole.append(row | estimated("same_token", same))
        if cell.name not in PARTED:
            continue
        for basis in BASES:
            row = about | dict(basis=basis)
            for part in PARTS:
                bits = _of(runs, Cache("int4", basis, part))
                row |= estimated(part, difference(bits, wide))
            parts.append(row)
    return dict(rows=sorted(whole, key=lambda r: -r["cache_bytes"]), parts=parts)


_HEADER = ("config", "mechanism", "cache", "cache bytes per token", "seeds", "bits per byte")
_HEADER += ("worse than float32", "against MHA", "same greedy token")
_PARTS_HEADER = ("config", "mechanism", "basis", "seeds", "keys in int4", "values in int4")


def _cells(r: Mapping) -> tuple:
    return (
        r["mechanism"],
        r["kind"],
        _shown(r),
        f"{r['cache_bytes']:,}",
        r["seeds"],
        shown(r, "bpb", ".4f"),
        shown(r, "worse", "+.4f", missing=""),
        shown(r, "against_mha", "+.4f", missing=""),
        shown(r, "same_token", ".2f", 100),
    )


def _shown(r: Mapping) -> str:
    """Returns a cache's dtype for the table: values' and keys', where they differ."""
    if r["cache_dtype"] == "int4" and r["mechanism"] in _SHORT_KEYS:
        return "int4, keys int8"
    return r["cache_dtype"] or "float32"


def _part_cells(r: Mapping) -> tuple:
    parts = (shown(r, part, "+.4f") for part in PARTS)
    return (r["mechanism"], r["kind"], r["basis"] or "changed", r["seeds"], *parts)


def main(arguments: Sequence[str]) -> int:
    """Trains and evaluates the missing runs and prints the tables; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME)
    parser.count(
        "steps", small_caches.STEPS, f"training steps of 8,192 tokens ({small_caches.STEPS})"
    )
    parser.names("mechanisms", MECHANISMS)
    parser.runs(f"runs/{NAME}")
    options = parser.parse(arguments)
    options.runs = local_folder(options.runs)

    def figures_of(finished: FinishedRuns) -> dict:
        return dict(tokens=options.steps * TOKENS_PER_STEP, **rows(finished))

    tables = [("rows", _HEADER, _cells), ("parts", _PARTS_HEADER, _part_cells)]
    how = dict(further_figures=bits_per_byte, code_files=_CODE)
    return side_by_side.study(NAME, cells(options.mechanisms), options, figures_of, tables, **how)


if __name__ == "__main__":
    command_line.run(main)
