"""Computes ranks by layer in proportion to the effective ranks of LRKV's trained residuals.

    python -m experiments.studies.rank_allocation [--runs=runs/studies] [--seeds=3] [--save]

LRKV's paper leaves a rank for each layer or head to future work (section 7). A simple rule gives
layers rank in proportion to their use of it. This study reads the models that `language_models
--study=lrkv_layer_ranks` trained with one rank for all layers, computes the effective rank of every
residual's weights U_k B_k, of keys and values, and divides the same total rank among layers in
proportion. It also computes the range over a layer's heads, per seed and for keys and values
separately, then averaged: if heads do not differ, ranks by head have no basis.
"""

from collections.abc import Sequence
import pathlib

from etils import epath
import numpy as np

from experiments import record
from experiments.studies.demo_size import STUDIES, UNIFORM
from experiments.studies.grid import Run
from experiments.studies.options import Parser, estimated, shown
from kvjax.analysis.measures import spectrum
from kvjax.convert import model as model_lib
from kvjax.foundation import command_line, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import estimate
from kvjax.foundation.output import Output
from kvjax.sweep import runs as runs_lib

NAME = "rank_allocation"
_PARTS = ("key", "value")


def effective_ranks(model: model_lib.LazyModel) -> np.ndarray:
    """Returns effective ranks of U_k B_k, [layers, keys/values, heads].

    Raises:
      UserError: a layer has no residuals.
    """
    ranks = []
    for index, config in enumerate(model.transformer.mechanisms):
        weights = model_lib.read_layer(model, index, "attention")["mechanism"]
        if not getattr(config, "rank", 0) or f"latent_{_PARTS[1]}" not in weights:
            raise UserError(f"layer {index} of {model.name} has no residuals of keys and values")
        ranks.append([_of_part(weights, part) for part in _PARTS])
    return np.array(ranks)


def _of_part(weights: dict, part: str) -> np.ndarray:
    """Returns effective ranks of U B by head, [K].

    The singular values of U B equal those of R_U B, with R_U the triangular QR factor of U.
    """
    latent_KDR = np.moveaxis(np.asarray(weights[f"latent_{part}"], np.float64), 1, 0)
    expand_KRH = np.asarray(weights[f"expand_{part}"], np.float64)
    left_KRR = np.linalg.qr(latent_KDR, mode="r")
    return spectrum.effective_rank(np.linalg.svd(left_KRR @ expand_KRH, compute_uv=False) ** 2)


def allocation(effective_L: np.ndarray, total: int, most: int) -> list[int]:
    """Divides `total` into integers from 1 to `most`, in proportion to effective ranks.

    Starts with one each, then adds one at a time where the share minus the integer is largest.

    Args:
      effective_L: effective ranks.
      total: total rank, from L to L·most.
    """
    share_L = effective_L / effective_L.sum() * total
    ranks_L = np.ones(len(effective_L), int)
    while ranks_L.sum() < total:
        open_L = np.where(ranks_L < most, share_L - ranks_L, -np.inf)
        ranks_L[np.argmax(open_L)] += 1
    return ranks_L.tolist()


def summary(ranks_SLPK: np.ndarray, rank: int, most: int) -> dict:
    """Returns a row per layer, with its share of `rank` times the number of layers.

    Args:
      ranks_SLPK: effective ranks by seed, layer, key or value, head.
      most: maximum rank of a head.
    """
    by_layer_SL = ranks_SLPK.mean(axis=(2, 3))
    ranks = allocation(by_layer_SL.mean(axis=0), rank * by_layer_SL.shape[1], most)
    rows = []
    for i, share in enumerate(ranks):
        heads_SPK = ranks_SLPK[:, i]  # heads do not correspond between seeds: a range per seed
        least, most_of = heads_SPK.min(axis=2).mean(), heads_SPK.max(axis=2).mean()
        row = dict(layer=i, least_head=least, most_head=most_of, rank=share)
        interval = estimate(by_layer_SL[:, i].tolist())
        rows.append(row | estimated("effective_rank", interval, "half_interval"))
    return dict(rank=rank, seeds=len(ranks_SLPK), rows=rows)


def workdir(folder: epath.Path, seed: int) -> epath.Path:
    """Returns the workdir of the finished run with one rank for all layers.

    Raises:
      UserError: the run is missing or unfinished.
    """
    study = STUDIES["lrkv_layer_ranks"]
    cell = next(cell for cell in study.cells() if cell.name == UNIFORM)
    run = Run(cell, seed, study.steps)
    name = run.name
    folder_of_run = folder / name
    if not runs_lib.is_finished(run, pathlib.Path(folder)):
        state = "an unfinished" if folder_of_run.exists() else "no"
        raise UserError(
            f"--runs = {folder}: has {state} {name}; `python -m "
            "experiments.studies.language_models --study=lrkv_layer_ranks` trains it"
        )
    return folder_of_run


def main(arguments: Sequence[str]) -> int:
    """Measures the runs and prints the table; returns 0."""
    parser = Parser(__doc__, NAME, trains=False)
    parser.add_argument("--runs", default="runs/studies", help="folder of the runs (runs/studies)")
    options = parser.parse(arguments)
    options.runs = runtime.folder("--runs", options.runs)
    runs = [workdir(options.runs, seed) for seed in range(options.seeds)]
    models = [model_lib.open(str(run)) for run in runs]
    mechanism = models[0].transformer.mechanisms[0]
    most = min(mechanism.key_dim, mechanism.value_dim)
    result = summary(np.stack([effective_ranks(model) for model in models]), mechanism.rank, most)
    out = Output(options)
    headings = ("layer", "effective rank", "heads, least", "most", "rank at equal bytes")
    cells = [
        (
            row["layer"],
            shown(row, "effective_rank", ".2f"),
            f"{row['least_head']:.2f}",
            f"{row['most_head']:.2f}",
            row["rank"],
        )
        for row in result["rows"]
    ]
    out.table(headings, cells)
    record.record(NAME, result, out, save=options.save)
    return 0


if __name__ == "__main__":
    command_line.run(main)
