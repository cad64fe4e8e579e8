"""Rows of the results in the repository follow from their runs."""

import itertools
import json
import types

import pytest

from experiments.record import RESULTS
from experiments.studies import (
    cross_attention,
    depth_8,
    diagonal,
    grid,
    images,
    language_models,
    linear_attention,
    long_rows,
    padded_loss,
    sequence_tasks,
    set_anomaly,
    small_caches,
    thin_keys_tasks,
)
from experiments.studies.demo_size import STUDIES
from experiments.studies.finished_runs import FinishedRuns
from experiments.tasks import anomalies, encoders, sequences


def _cells_of_sets(study, trainer, sizes, *more):
    shapes = itertools.product(*(sizes[key] for key in ("widths", "layers", "heads")))
    every = itertools.product(shapes, encoders.VARIANTS, *more)
    return [study(trainer, variant, shape, *rest) for shape, variant, *rest in every]


def _anomalies(found, kept):
    features = types.SimpleNamespace(digest=found["features"])
    trainer = types.SimpleNamespace(features=features, epochs=found["grid"]["epochs"], train=print)
    cells = _cells_of_sets(set_anomaly.cell, trainer, found["grid"], anomalies.PLACES)
    return set_anomaly.rows(cells, kept)


def _images(found, kept):
    """Takes runs by the names of their cells: results lack the digests of the files."""
    data, sizes = types.SimpleNamespace(files={}), found["grid"]
    of_models = dict(epochs=sizes["epochs"], fixed=images.Fixed(), train=print)
    trainer = types.SimpleNamespace(images=data, **of_models)

    def cell(*given):
        return images.cell(found["set"], *given)

    cells = _cells_of_sets(cell, trainer, sizes, sizes["patches"], sizes["rates"])
    for one in cells:
        for run in kept.runs[one.name].values():
            run["identity"] = one.identity
    return images.rows(found["set"], cells, kept)


def _thin_keys(found, kept):
    names = itertools.product(*(getattr(thin_keys_tasks, n) for n in ("STARTS", "TASKS")))
    cells = [
        thin_keys_tasks.cell(name, channels, start)
        for start, name in names
        for channels in thin_keys_tasks.CHANNELS
    ]
    return thin_keys_tasks.rows(cells, kept)


def _cross(found, kept):
    cells = [cross_attention.cell(kind, found["steps"]) for kind in cross_attention.KINDS]
    return cross_attention.rows(cells, kept)


def _padded(found, kept):
    kinds = itertools.product(padded_loss.FORMS, padded_loss.TIES)
    cells = [padded_loss.cell(tie, form, found["steps"]) for form, tie in kinds]
    return padded_loss.rows(cells, kept)


SMALL = {
    "cross_attention": _cross,
    "diagonal": lambda _, kept: diagonal.rows(kept),
    "images/fashion_mnist": _images,
    "images/mnist": _images,
    "linear_attention": lambda _, kept: linear_attention.rows(kept),
    "padded_loss": _padded,
    "sequence_tasks": lambda _, kept: sequence_tasks.rows(sequence_tasks.in_common(kept), kept),
    "set_anomaly": _anomalies,
    "thin_keys_tasks": _thin_keys,
}
LARGE = {
    "depth_8": lambda kept: depth_8.rows(
        [depth_8.cell(name, "folder", kept.steps) for name in depth_8.MECHANISMS], kept
    ),
    "long_rows": lambda kept: long_rows.rows(
        kept.by_cell(
            long_rows.cell(*one)
            for one in itertools.product(long_rows.MECHANISMS, long_rows.LENGTHS)
        )
    ),
    "small_caches": small_caches.rows,
} | {
    f"studies/{name}": lambda kept, study=study: language_models.rows(study.cells(), kept)
    for name, study in STUDIES.items()
}


def _check(found, rows):
    assert len(rows) == len(found["rows"]) > 0
    for now, stored in zip(json.loads(json.dumps(rows)), found["rows"], strict=True):
        assert {key: now[key] for key in stored if key != "kind"} == {
            key: value for key, value in stored.items() if key != "kind"
        }


def _read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", SMALL)
def test_small_models(name):
    """Rows are equal, and tables have a cell for each column."""
    found, kept = _read(name), FinishedRuns(RESULTS / f"{name}.json", {}, {}, mix=True, fresh=False)
    rows, study = SMALL[name](found, kept), globals()[name.partition("/")[0]]
    _check(found, rows)
    columns = len(getattr(study, "_HEADER", ("variant", *sequences.TASKS)))
    assert {len(study._cells(row)) for row in rows} == {columns}


@pytest.mark.parametrize("name", LARGE)
def test_runs_in_folders_of_their_own(name):
    found = _read(name)
    kept = grid.FinishedRuns(RESULTS / f"{name}.json", found["steps"], mix=True, fresh=False)
    _check(found, LARGE[name](kept))


def test_curves():
    found = _read("sequence_tasks")
    kept = FinishedRuns(RESULTS / "sequence_tasks.json", {}, {}, mix=True, fresh=False)
    assert sequence_tasks.curves(kept) == found["curves"]
    found = _read("depth_8")
    curves = depth_8._curves(found["runs"], found["stopped"])
    whole = {name: {int(seed): curve for seed, curve in of.items()} for name, of in curves.items()}
    assert depth_8.by_step(whole) == found["by_step"]
