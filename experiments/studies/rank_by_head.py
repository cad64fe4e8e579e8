"""Truncates trained residuals to a half and a quarter of their rank, in four ways.

    python -m experiments.studies.rank_by_head [--runs=runs/studies] [--ranks=8,4] [--save]

LRKV's paper leaves a rank for each layer or head to future work (section 7). This study takes
models trained with one rank for all layers (`language_models --study=lrkv_layer_ranks`), and drops
the smallest singular values of their residuals U_k B_k until a total rank is left. The four ways to
divide the total: equally; by layer or by head in proportion to effective rank (`rank_allocation`);
and to the largest singular values of all. In the last two, keys and values have equal totals.
Models are not tuned after truncation. Equal total ranks stand for equal cache bytes; no cache with
ranks by head is built. Prints held-out bits per byte, and differences from equal ranks, seed by
seed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

from etils import epath
from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments import record
from experiments.studies.options import Parser, estimated, shown
from experiments.studies.rank_allocation import allocation, workdir
from experiments.tasks.positions import rows_of
from kvjax.analysis.measures import spectrum
from kvjax.foundation import command_line, runtime
from kvjax.foundation.configuration import between
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import difference, estimate
from kvjax.foundation.output import Output
from kvjax.model.loss import token_losses
from kvjax.model.transformer import Compute, Transformer
from kvjax.workdir import trained

NAME = "rank_by_head"
WAYS = ("equal", "by layer", "by head", "by singular value")
WHOLE = "uncut"
ROWS, LENGTH, BATCH = 192, 256, 8  # size of the held-out text
_PARTS = ("key", "value")
_MECHANISM = ("segments", 0, "attention", "mechanism")


@dataclasses.dataclass(frozen=True)
class Residuals:
    """Singular value decompositions of U_k B_k of all layers, keys and values, head by head."""

    left: np.ndarray  # [L, 2, K, D, R]
    singular: np.ndarray  # [L, 2, K, R], largest first
    right: np.ndarray  # [L, 2, K, R, H]

    @classmethod
    def of(cls, weights: Mapping[str, np.ndarray]) -> "Residuals":
        """Decomposes the products of a model's weights.

        Args:
          weights: latent_key and latent_value [L, D, K, R], expand_key, expand_value [L, K, R, H],
            R at most H.
        """
        latent, expand = (
            np.stack([np.asarray(weights[f"{name}_{part}"], float) for part in _PARTS], axis=1)
            for name in ("latent", "expand")
        )
        q, left = np.linalg.qr(np.moveaxis(latent, 3, 2))  # [L, 2, K, D, R], [L, 2, K, R, R]
        inner, singular, right = np.linalg.svd(left @ expand, full_matrices=False)
        return cls(q @ inner, singular, right)

    def cut(self, ranks_LPK: np.ndarray) -> dict[str, np.ndarray]:
        """Returns weights, named as in `of`, of the best approximations of these ranks."""
        mask = np.arange(self.singular.shape[-1]) < ranks_LPK[..., None]
        latent = np.moveaxis(self.left * (self.singular * mask)[..., None, :], 2, 3)
        weights = {}
        for i, part in enumerate(_PARTS):
            weights[f"latent_{part}"] = latent[:, i]
            weights[f"expand_{part}"] = self.right[:, i]
        return weights

    def ranks(self, way: str, rank: int) -> np.ndarray:
        """Returns ranks [layers, keys/values, KV heads] whose mean is `rank`."""
        L, P, K, R = self.singular.shape
        effective_LPK = spectrum.effective_rank(self.singular**2)
        if way == "equal":
            return np.full((L, P, K), rank)
        if way == "by layer":
            ranks_L = allocation(effective_LPK.mean(axis=(1, 2)), rank * L, R)
            return np.broadcast_to(np.reshape(ranks_L, (L, 1, 1)), (L, P, K))
        if way not in WAYS:
            raise ValueError(f"way = {way!r}: must be one of {WAYS}")
        ranks = np.zeros((L, P, K), int)
        for part in range(P):  # keys and values differ in scale
            if way == "by head":
                ranks_LK = allocation(effective_LPK[:, part].ravel(), rank * L * K, R)
            else:
                largest = np.argsort(self.singular[:, part], axis=None)[::-1][: rank * L * K]
                ranks_LK = np.bincount(largest // R, minlength=L * K)
            ranks[:, part] = np.reshape(ranks_LK, (L, K))
        return ranks


class Judge:
    """Evaluates a model on rows of text, with its own or with truncated residuals."""

    def __init__(
        self, model: Transformer, compute: Compute, rows: np.ndarray, bytes_per_token: float
    ):
        """Decomposes the model's residuals.

        Args:
          rows: tokens [rows, T + 1].

        Raises:
          UserError: the model has no residuals of keys and values, or layers that differ.
        """
        self._graph, params = nnx.split(model)
        self._params = traverse_util.flatten_dict(nnx.to_pure_dict(params))
        self._rows, self._bytes = rows, bytes_per_token
        self.rank = getattr(model.config.mechanisms[0], "rank", 0)
        names = [f"{name}_{part}" for name in ("latent", "expand") for part in _PARTS]
        weights = {name: self._params.get((*_MECHANISM, name)) for name in names}
        one_group = len(model.config.layer_groups) == 1
        if not one_group or not self.rank or any(x is None for x in weights.values()):
            raise UserError("--runs: needs layers of one kind with residuals of keys and values")
        self.residuals = Residuals.of(weights)

        @jax.jit
        def nats(flat, x_BT, y_BT):
            model = nnx.merge(self._graph, traverse_util.unflatten_dict(flat))
            return token_losses(model, x_BT, y_BT, compute=compute)

        self._nats = nats

    def bits_per_byte(self, ranks_LPK: np.ndarray | None = None) -> float:
        """Returns bits per byte with residuals truncated to these ranks; None: as trained."""
        params = dict(self._params)
        if ranks_LPK is not None:
            for name, array in self.residuals.cut(ranks_LPK).items():
                path = (*_MECHANISM, name)
                params[path] = jnp.asarray(array, params[path].dtype)
        parts = (self._rows[i : i + BATCH] for i in range(0, len(self._rows), BATCH))
        nats = np.concatenate([self._nats(params, x[:, :-1], x[:, 1:]) for x in parts])
        return float(nats.mean(dtype=np.float64)) / math.log(2) / self._bytes


def judge(run: epath.Path) -> Judge:
    """Returns the `Judge` of a trained run's model, on held-out text."""
    loaded = trained.load(run)
    return Judge(loaded.model, loaded.compute, *rows_of(loaded.tokenizer, ROWS, LENGTH))


def measure(model: Judge, ranks: Sequence[int]) -> list[dict]:
    """Returns a row of the uncut model, and one per rank and way.

    A row has bits per byte, and the smallest and largest rank of a head.
    """
    whole = dict(rank=model.rank, way=WHOLE, least=model.rank, most=model.rank)
    rows = [whole | dict(bpb=model.bits_per_byte())]
    for rank in ranks:
        for way in WAYS:
            ranks_LPK = model.residuals.ranks(way, rank)
            of_heads = dict(least=int(ranks_LPK.min()), most=int(ranks_LPK.max()))
            rows.append(dict(rank=rank, way=way, bpb=model.bits_per_byte(ranks_LPK), **of_heads))
    return rows


def summary(runs: Mapping[int, Sequence[Mapping]]) -> list[dict]:
    """Returns a row per rank and way over seeds, with its difference from equal ranks.

    Args:
      runs: rows of `measure` by seed.
    """
    rows_by_way = {}
    for seed, rows in runs.items():
        for row in rows:
            rows_by_way.setdefault((row["rank"], row["way"]), {})[seed] = row
    table = []
    for (rank, way), seeds in rows_by_way.items():
        bpb = {seed: row["bpb"] for seed, row in seeds.items()}
        equal = {seed: row["bpb"] for seed, row in rows_by_way.get((rank, WAYS[0]), {}).items()}
        row = dict(rank=rank, way=way, seeds=len(seeds))
        row |= dict(least=min(r["least"] for r in seeds.values()))
        row |= dict(most=max(r["most"] for r in seeds.values()))
        row |= estimated("bpb", estimate(list(bpb.values())))
        gap = difference(bpb, equal) if way in WAYS[1:] else None
        table.append(row | estimated("change", gap))
    return table


_HEADER = ("ranks a head", "divided", "bits per byte", "against equal", "a head has")


def _cells(row: Mapping) -> tuple:
    heads = f"{row['least']} to {row['most']}" if row["least"] < row["most"] else row["least"]
    gap = shown(row, "change", "+.4f", missing="")
    return row["rank"], row["way"], shown(row, "bpb", ".4f"), gap, heads


def main(arguments: Sequence[str]) -> int:
    """Truncates, evaluates and prints the table; returns 0."""
    parser = Parser(__doc__, NAME, trains=False)
    parser.add_argument("--runs", default="runs/studies", help="folder of the runs (runs/studies)")
    parser.integers("ranks", (8, 4), "mean ranks per head after truncation")
    options = parser.parse(arguments)
    options.runs = runtime.folder("--runs", options.runs)
    runtime.start()
    runs = [workdir(options.runs, seed) for seed in range(options.seeds)]
    by_seed = {}
    for seed, run in enumerate(runs):
        model = judge(run)
        for rank in options.ranks:
            between("--ranks", rank, 1, model.rank)
        by_seed[seed] = measure(model, options.ranks)
    result = dict(rows=summary(by_seed), runs={str(seed): rows for seed, rows in by_seed.items()})
    out = Output(options)
    out.table(_HEADER, map(_cells, result["rows"]))
    record.record(NAME, result, out, save=options.save)
    return 0


if __name__ == "__main__":
    command_line.run(main)
