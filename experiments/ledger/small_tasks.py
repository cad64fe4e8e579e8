"""Rules for claims of projection sharing that small models answer: tasks, images, sets, A.1."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
import statistics

from flax import nnx

from experiments.ledger import verdicts
from experiments.ledger.results import NoResultError, paired, read
from experiments.ledger.verdicts import Cases, Chain, Differs, Same
from experiments.studies.images import EPOCHS
from experiments.studies.sequence_tasks import CURVES_OF
from experiments.tasks import encoders, sequences
from experiments.tasks.encoders import CALLED
from kvjax.foundation.estimate import Estimate

_ENCODERS = "a sample of the paper's grid"
_SOLVED = 0.9995  # as printed, 1.000
# The paper's grids (sections 3.1 and 3.2). What was trained outside of them is no sample of them.
_GRID = {"width": (32, 64, 256), "layers": (2, 4), "heads": (2, 4), "length": (16, 64, 128)}
_GRID_OF_IMAGES = {
    "widths": (64, 256, 512),
    "layers": (2, 4),
    "heads": (2, 4),
    "patches": (4, 7),
    "rates": (1e-3, 1e-4),
}
# Numbers in a row from which a task is told: all variants solve shorter ones to the last.
_LENGTHS = {"sort": 16, "reverse": 64, "swap": 64}


def _shares(task: str, *variants: str) -> list[dict[int, float]]:
    """Returns each variant's % of right positions by seed, averaged over grid cells that all have.

    Cells are named TASK/VARIANT/dWIDTH_lLAYERS_hHEADS_tLENGTH; of too short rows none counts.
    """
    by_variant: list[dict[str, dict]] = []
    for variant in variants:
        start = f"{task}/{variant}/"
        cells = {
            name.removeprefix(start): seeds
            for name, seeds in read("sequence_tasks")["runs"].items()
            if name.startswith(start) and _counts(name.removeprefix(start), _LENGTHS[task])
        }
        by_variant.append(cells)
    common = set.intersection(*map(set, by_variant))
    return [_means([cells[name] for name in sorted(common)]) for cells in by_variant]


def _counts(cell: str, least: int) -> bool:
    """True if a cell is of the paper's grid, and of rows of at least so many numbers."""
    sizes = dict(zip(_GRID, ([int(part[1:])] for part in cell.split("_")), strict=True))
    return sizes["length"][0] >= least and _within(sizes, _GRID)


def _within(sizes: Mapping[str, Sequence], grid: Mapping[str, Sequence]) -> bool:
    """True if all sizes that were trained, by their names, are of a grid."""
    return all(set(sizes[key]) <= set(values) for key, values in grid.items())


def _means(cells: list[dict]) -> dict[int, float]:
    """By seed that all cells have, %."""
    seeds = set.intersection(*map(set, cells)) if cells else set()
    return {int(seed): 100 * sum(c[seed]["right"] for c in cells) / len(cells) for seed in seeds}


def table_2(task: str, first: str, second: str):
    """First less second in points of accuracy, seed by seed."""
    return lambda: paired(*_shares(task, first, second), task)


def tells(task: str, first: str, second: str, sign: int) -> Differs:
    return Differs(table_2(task, first, second), sign, "+.2f", _points(task))


def falls_faster(first: str, others: tuple[str, ...]) -> Chain:
    """The loss of one variant, mean over all of training, is below the others' on each task."""

    def mean_losses(task: str, variant: str) -> dict[str, float]:
        runs = read("sequence_tasks")["runs"].get(f"{task}/{variant}/{CURVES_OF}", {})
        kept = {seed: run["curve"] for seed, run in runs.items() if "curve" in run}
        return {seed: statistics.mean(curve["loss"]) for seed, curve in kept.items()}

    def of() -> dict[str, tuple[Estimate, int]]:
        found = {}
        for task, other in itertools.product(sequences.TASKS, others):
            name = f"{task} from {CALLED[other]}'s"
            found[name] = paired(mean_losses(task, first), mean_losses(task, other), name)
        return found

    how = f"nats a number, mean over training, {CURVES_OF}, a length that the paper's grid lacks"
    return Chain(of, -1, "+.4f", how)


@dataclasses.dataclass(frozen=True)
class Alike:
    """Two variants that differ by less than a margin, on a task that is not solved by both."""

    task: str
    first: str
    second: str
    margin: float

    def judge(self) -> verdicts.Found:
        both = _shares(self.task, self.first, self.second)
        if all(found and min(found.values()) >= 100 * _SOLVED for found in both):
            said = f"both solve it ({_points(self.task)})"
            return verdicts.Found(verdicts.UNTOLD, said)
        of = table_2(self.task, self.first, self.second)
        return Same(of, self.margin, "+.2f", _points(self.task)).judge()


def _points(task: str) -> str:
    return f"points of accuracy, {_ENCODERS}, {_LENGTHS[task]} numbers or more"


def all_right(task: str) -> Cases:
    """Every variant labels at least 99.95 % of the positions: 1.000 as printed."""

    def of() -> dict[str, float]:
        rows = read("sequence_tasks")["rows"]
        found = {r["variant"]: r["tasks"][task] for r in rows if task in r["tasks"]}
        few = any(now["seeds"] < verdicts.SEEDS for now in found.values())
        outside = not all(_within(now, _GRID) for now in found.values())
        if few or outside or found.keys() != {"qkv", *_VARIANTS}:
            raise NoResultError(f"sequence_tasks, {task}")
        return {variant: now["right"] for variant, now in found.items()}

    def figures() -> str:
        told = ", ".join(f"{CALLED[name]} {right:.3f}" for name, right in of().items())
        return f"{told} ({_ENCODERS}, {verdicts.SEEDS} seeds or more)"

    return Cases(lambda: {name: right >= _SOLVED for name, right in of().items()}, figures)


def image(name: str, variant: str):
    """A variant less QKV in points of accuracy."""

    def of() -> tuple[Estimate, int]:
        grid = read(f"images/{name}")["grid"]
        if grid["epochs"] != EPOCHS[name] or not _within(grid, _GRID_OF_IMAGES):
            raise NoResultError(f"images/{name}, of the paper's grid and epochs")
        for row in read(f"images/{name}")["rows"]:
            if row["variant"] == variant and row["from_qkv"] is not None:
                off = Estimate(row["from_qkv"], row["from_qkv_half_interval"])
                return off.times(100), row["seeds"]
        raise NoResultError(name)

    return of


def _shape(name: str) -> str:
    grid = read(f"images/{name}")["grid"]
    each = lambda key: " and ".join(map(str, grid[key]))
    return (
        f"of the paper's grid d = {each('widths')}, {each('layers')} layers, "
        f"{each('heads')} heads, squares of {each('patches')}; its {grid['epochs']} epochs"
    )


_VARIANTS = ("qk_tied", "qk_tied_plus", "kv_tied", "qkv_tied", "qkv_tied_plus")


def images_alike(
    name: str, margin: float, variants: tuple[str, ...] = _VARIANTS
) -> verdicts.AllSame:
    """What is less or more than QKV's by no more than a margin, in points."""
    return verdicts.AllSame(
        lambda: {CALLED[variant]: image(name, variant)() for variant in variants},
        margin,
        "+.2f",
        lambda: f"points from QKV; {_shape(name)}",
    )


def _anomalies(place: str) -> dict[str, dict[int, float]]:
    """By variant and seed the accuracy in points, means over cells."""
    runs, found = read("set_anomaly")["runs"], {}
    for variant in ("qkv", *_VARIANTS):
        mine = [r for name, r in runs.items() if name.startswith(f"{place}/{variant}/")]
        found[variant] = _means(mine)
    return found


def best_anomaly(place: str):
    """(Q=K-V)+ less the best of the other variants, by their means, seed by seed."""

    def of() -> tuple[Estimate, int]:
        found = _anomalies(place)
        mine = found.pop("qk_tied_plus")
        others = [by_seed for by_seed in found.values() if by_seed]
        if not others:
            raise NoResultError(place)
        best = max(others, key=lambda by_seed: statistics.mean(by_seed.values()))
        return paired(mine, best, place)

    return of


def drawn_less_last(variant: str):
    """What drawing the anomaly's place does to a variant, in points."""
    return lambda: paired(_anomalies("drawn")[variant], _anomalies("last")[variant], variant)


@dataclasses.dataclass(frozen=True)
class NoHelp:
    """Remedies that do not help consistently: somewhere they harm, or they change nothing anywhere.

    Harm is an interval over seeds below 0, help one above it; nothing lies within a margin around
    it. What helps everywhere refutes the claim; what helps here and does nothing there is not told
    apart. Asked are tasks and variants that leave room for help: the share that is right without is
    below 100 % by more than the margin.

    Attributes:
      margin: in points of accuracy.
    """

    margin: float

    def judge(self) -> verdicts.Found:
        found, said = self._changes(), []
        told = []
        for remedy, changes in found.items():
            shown = (f"{where} {x.shown('+.1f')}" for where, x in changes.items())
            told.append(of_remedy := self._of(list(changes.values())))
            said.append(f"{remedy} ({of_remedy}): {', '.join(shown)}")
        hottest = read("diagonal")["hottest"]
        how = f"points of accuracy, {_DIAGONAL_LENGTH} numbers, margin {self.margin:g}"
        how += f"; annealed from {hottest:g} to 1 in half the steps"
        return verdicts.Found(verdicts.of_all(told), f"{'; '.join(said)}; {how}")

    def _of(self, changes: list[Estimate]) -> str:
        """The verdict on one remedy."""
        nothing = all(abs(x.mean) + x.half <= self.margin for x in changes)
        if nothing or any(x.sign < 0 for x in changes):
            return verdicts.REPRODUCED
        helps = all(x.sign > 0 for x in changes)
        return verdicts.CONTRADICTED if helps else verdicts.UNTOLD

    def _changes(self) -> dict[str, dict[str, Estimate]]:
        """By remedy, then by variant and task."""
        rows = [r for r in read("diagonal")["rows"] if r["length"] == _DIAGONAL_LENGTH]
        named = lambda row: f"{CALLED[row['variant']]} {row['task']}"
        plain = {named(row): 100 * row["right"] for row in rows if row["remedy"] == "none"}
        asked = {where for where, right in plain.items() if right < 100 - self.margin}
        found: dict[str, dict[str, Estimate]] = {"normalised": {}, "annealed": {}}
        for row in rows:
            if row["remedy"] == "none" or named(row) not in asked:
                continue
            if row["seeds_in_common"] < verdicts.SEEDS:
                raise NoResultError("diagonal")
            change = Estimate(row["change"], row["change_half_interval"]).times(100)
            found[row["remedy"]][named(row)] = change
        if len(asked) < 2 or any(changes.keys() != asked for changes in found.values()):
            raise NoResultError("diagonal")
        return found


_DIAGONAL_LENGTH = 64


def padding() -> str:
    """What padding that counts does to a model's perplexity, and to a difference of two."""
    rows = {(r["tie"], r["trained"]): r for r in read("padded_loss")["rows"]}
    if not {("none", "padded"), ("kv", "padded")} <= rows.keys():
        raise NoResultError("padded_loss")
    qkv, tied = rows["none", "padded"], rows["kv", "padded"]
    of = {judged: qkv["perplexity"][judged]["mean"] for judged in ("text", "counted")}
    apart = {judged: tied["against_first"][judged]["percent"] for judged in ("text", "counted")}
    return (
        f"in models of bytes, where {100 * qkv['share_of_text']:.0f} % of targets are text, "
        f"counting the others turns a perplexity of {of['text']:.2f} into {of['counted']:.2f}, "
        f"and what Q-K=V costs from {apart['text']:.1f} % into {apart['counted']:.1f} %"
    )


def packed(tie: str):
    """A model of bytes less QKV's in nats, trained and judged on packed rows."""

    def of() -> tuple[Estimate, int]:
        for row in read("padded_loss")["rows"]:
            now = row["against_first"].get("packed")
            if (row["tie"], row["trained"]) == (tie, "packed") and now:
                return Estimate(now["nats"], now["half_interval"]), row["seeds"]
        raise NoResultError("padded_loss")

    return of


def symmetric() -> dict[str, bool]:
    """Whether q·k is k·q where q = k, and whether its softmax is, in random weights."""
    import jax
    import numpy as np

    from kvjax.attention import GroupedConfig
    from kvjax.layers import rope

    def logits(tie: str) -> np.ndarray:
        shape = dict(num_heads=2, num_kv_heads=2, num_bases=2, rank=0, key_dim=8, value_dim=8)
        mechanism = GroupedConfig(**shape, tie=tie).build(16, rngs=rngs())
        places = rope.positions(np.arange(6)[None], 8, None)
        x_BTD = jax.random.normal(jax.random.key(1), (1, 6, 16))
        q_BTNH, raw = mechanism.project(x_BTD, places)
        k_BTNH, _ = mechanism.keys_values(raw, places)
        return np.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH)

    def gaps(tie: str) -> tuple[float, float]:
        z_BNTS = logits(tie)
        p_BNTS = np.exp(z_BNTS) / np.exp(z_BNTS).sum(axis=-1, keepdims=True)
        return tuple(float(np.abs(x - x.swapaxes(2, 3)).max()) for x in (z_BNTS, p_BNTS))

    return {"logits": gaps("qk")[0] < 1e-5 < gaps("none")[0], "maps": gaps("qk")[1] < 1e-5}


def moved() -> dict[str, float]:
    """How far labels of a turned set are from its labels turned, by variant, random weights."""
    import jax
    import numpy as np

    from kvjax.model.labeller import Labeller

    rng, found = np.random.default_rng(0), {}
    x_BTF = rng.normal(size=(1, 6, 8)).astype(np.float32)
    form = dict(norm_after=True, positions="none", activation="relu", mlp_dim=32)
    label = nnx.jit(lambda model, x_BTF: model(x_BTF))
    for variant in encoders.VARIANTS:
        config = encoders.transformer(variant, 10, 16, 1, 2, labels=1, **form)
        make = functools.partial(Labeller, config, jax.random.key(0), features=8)
        graph, state = nnx.split(nnx.eval_shape(make))
        draw = lambda x: jax.device_put(rng.normal(0, 0.5, x.shape).astype(x.dtype))
        model = nnx.merge(graph, jax.tree.map(draw, state))
        gap = label(model, x_BTF[:, ::-1]) - label(model, x_BTF)[:, ::-1]
        found[CALLED[variant]] = float(abs(gap).max())
    return found


def equivariant() -> dict[str, bool]:
    return {variant: gap < 1e-4 for variant, gap in moved().items()}


def equivariant_said() -> str:
    return "in random weights: the map that a + adds is of places, so it sees them"


def apart() -> dict[str, float]:
    """How far recurrence and chunks are from all pairs of tokens, tied, by decay, in float64."""
    import jax
    import numpy as np

    from kvjax.attention import linear

    found, chunked = {}, functools.partial(linear.chunked, chunk=16)
    with jax.enable_x64(True):
        z = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 100, 2, 8)))
        features = linear.feature_map(z)
        for decay in (1.0, 0.9):
            config = linear.LinearConfig(num_heads=2, key_dim=8, value_dim=8, tie="qkv")
            start = config.start(2, z.dtype)
            whole = jax.jit(linear.parallel)(features, features, z, decay)
            one, _ = jax.jit(linear.recurrent)(features, features, z, decay, start)
            few, _ = jax.jit(chunked)(features, features, z, decay, start)
            found[f"decay {decay}"] = float(max(abs(one - whole).max(), abs(few - whole).max()))
    return found


def forms() -> dict[str, bool]:
    return {name: gap < 1e-10 for name, gap in apart().items()}


def forms_said() -> str:
    return "in float64 the forms differ by less than 1e-10; the state is S and one vector a head"


def learned(task: str, first: str, second: str):
    """First less second in points, seed by seed, of `experiments.studies.linear_attention`."""

    def of() -> tuple[Estimate, int]:
        runs = read("linear_attention")["runs"]
        by_seed = lambda kind: {
            seed: 100 * run["figure"] for seed, run in runs.get(f"{task}/{kind}", {}).items()
        }
        return paired(by_seed(first), by_seed(second), task)

    return of


def learned_less(pairs: Mapping[str, tuple[str, str, str]]) -> Chain:
    """By name a task and two kinds of attention, of which the first learns it less well."""
    of = lambda: {name: learned(*pair)() for name, pair in pairs.items()}
    return Chain(of, -1, "+.1f", "points, 4 layers of 64")


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)
