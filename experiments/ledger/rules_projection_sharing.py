"""Rules for claims of projection sharing: small tasks, images, sets, caches, section A.1."""

from collections.abc import Mapping, Sequence
import functools
import itertools
import statistics

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.ledger import judge
from experiments.models import linear
from experiments.models.labeller import Labeller
from experiments.studies.images import EPOCHS
from experiments.studies.sequence_tasks import CURVES_OF
from experiments.tasks import encoders
from experiments.tasks.encoders import CALLED, VARIANTS
from kvjax.attention import GroupedConfig
from kvjax.costs import formulas
from kvjax.foundation.intervals import Estimate
from kvjax.layers import rope

_SAMPLE = "a sample of the paper's grid"
_SOLVED = 0.9995  # as printed, 1.000
# The paper's grids (sections 3.1 and 3.2); cells outside of them do not count.
_GRID = {"width": (32, 64, 256), "layers": (2, 4), "heads": (2, 4), "length": (16, 64, 128)}
_GRID_OF_IMAGES = {
    "widths": (64, 256, 512),
    "layers": (2, 4),
    "heads": (2, 4),
    "patches": (4, 7),
    "rates": (1e-3, 1e-4),
}
# The shortest rows that count in a task's verdict: all variants solve shorter rows.
_LENGTHS = {"sort": 16, "reverse": 64, "swap": 64}

# -- sequence tasks --------------------------------------------------------------------------------


@judge.source
def accuracy(task: str, first: str, second: str) -> judge.Difference:
    """Returns first minus second in points of accuracy, by seed."""
    return judge.paired(*_accuracies(task, first, second), task)


def _accuracies(task: str, *variants: str) -> list[dict[int, float]]:
    """Returns each variant's accuracy in % by seed, averaged over grid cells that all have.

    Cells are named TASK/VARIANT/dWIDTH_lLAYERS_hHEADS_tLENGTH.
    """
    by_variant: list[dict[str, dict]] = []
    for variant in variants:
        start = f"{task}/{variant}/"
        cells_of = {
            name.removeprefix(start): seeds
            for name, seeds in judge.read("sequence_tasks")["runs"].items()
            if name.startswith(start) and _in_grid(name.removeprefix(start), _LENGTHS[task])
        }
        by_variant.append(cells_of)
    common = set.intersection(*map(set, by_variant))
    return [_means([cells_of[name] for name in sorted(common)]) for cells_of in by_variant]


def _in_grid(cell: str, least: int) -> bool:
    """Returns whether a cell is in the paper's grid and has rows of at least `least` numbers."""
    sizes = dict(zip(_GRID, ([int(size[1:])] for size in cell.split("_")), strict=True))
    return sizes["length"][0] >= least and _inside(sizes, _GRID)


def _inside(sizes: Mapping[str, Sequence], grid: Mapping[str, Sequence]) -> bool:
    return all(set(sizes[key]) <= set(values) for key, values in grid.items())


def _means(cells_of: list[dict]) -> dict[int, float]:
    """Returns accuracy in %, by each seed that all cells have."""
    seeds = set.intersection(*map(set, cells_of)) if cells_of else set()
    return {
        int(seed): 100 * sum(c[seed]["right"] for c in cells_of) / len(cells_of) for seed in seeds
    }


@judge.rule
def alike(task: str, first: str, second: str, margin: float) -> judge.Judgement:
    """Checks that two variants differ by at most a margin, on a task that not both solve."""
    scale = f"points of accuracy, {_SAMPLE}, {_LENGTHS[task]} numbers or more"
    both = _accuracies(task, first, second)
    if all(by_seed and min(by_seed.values()) >= 100 * _SOLVED for by_seed in both):
        return judge.Judgement(judge.INDISTINCT, f"both solve it ({scale})")
    return judge.same({"accuracy": (task, first, second)}, margin, "+.2f", scale)


@judge.rule
def solved(task: str) -> judge.Judgement:
    """Checks that every variant labels at least 99.95 % of the positions: 1.000 as printed."""
    rows = judge.read("sequence_tasks")["rows"]
    accuracies = {r["variant"]: r["tasks"][task] for r in rows if task in r["tasks"]}
    few = any(row["seeds"] < judge.SEEDS for row in accuracies.values())
    outside = not all(_inside(row, _GRID) for row in accuracies.values())
    if few or outside or accuracies.keys() != set(VARIANTS):
        raise judge.NoResultError(f"sequence_tasks, {task}")
    ours = ", ".join(f"{CALLED[name]} {row['right']:.3f}" for name, row in accuracies.items())
    return judge.cases(
        {name: row["right"] >= _SOLVED for name, row in accuracies.items()},
        f"{ours} ({_SAMPLE}, {judge.SEEDS} seeds or more)",
    )


@judge.source
def mean_loss(task: str, first: str, second: str) -> judge.Difference:
    """Returns first minus second in loss, mean over training, by seed."""

    def losses(variant: str) -> dict[str, float]:
        runs = judge.read("sequence_tasks")["runs"].get(f"{task}/{variant}/{CURVES_OF}", {})
        return {
            seed: statistics.mean(run["curve"]["loss"])
            for seed, run in runs.items()
            if "curve" in run
        }

    return judge.paired(losses(first), losses(second), task)


# -- images and sets -------------------------------------------------------------------------------


@judge.source
def image(name: str, variant: str) -> judge.Difference:
    """Returns a variant's accuracy minus QKV's, in points."""
    result = judge.read(f"images/{name}")
    if result["grid"]["epochs"] != EPOCHS[name] or not _inside(result["grid"], _GRID_OF_IMAGES):
        raise judge.NoResultError(f"images/{name}, of the paper's grid and epochs")
    for row in result["rows"]:
        if row["variant"] == variant and row["from_qkv"] is not None:
            gap = Estimate(row["from_qkv"], row["from_qkv_half_interval"])
            return gap.times(100), row["seeds"]
    raise judge.NoResultError(name)


@judge.rule
def images_alike(name: str, margin: float, variants: Sequence[str]) -> judge.Judgement:
    """Checks that variants lie within a margin of QKV, in points."""
    grid = judge.read(f"images/{name}")["grid"]
    sizes = {key: " and ".join(map(str, x)) for key, x in grid.items() if isinstance(x, list)}
    scale = (
        f"points from QKV; of the paper's grid d = {sizes['widths']}, {sizes['layers']} layers, "
        f"{sizes['heads']} heads, squares of {sizes['patches']}; its {grid['epochs']} epochs"
    )
    by_name = {CALLED[variant]: {"image": (name, variant)} for variant in variants}
    return judge.all_same(by_name, margin, "+.2f", scale)


def _anomalies(place: str) -> dict[str, dict[int, float]]:
    """Returns the accuracy in points by variant and seed, means over cells."""
    runs = judge.read("set_anomaly")["runs"]
    return {
        variant: _means([r for name, r in runs.items() if name.startswith(f"{place}/{variant}/")])
        for variant in VARIANTS
    }


@judge.source
def best_anomaly(place: str, variant: str) -> judge.Difference:
    """Returns a variant's accuracy minus the best other variant's (by mean), in points."""
    accuracies = _anomalies(place)
    own = accuracies.pop(variant)
    others = [by_seed for by_seed in accuracies.values() if by_seed]
    if not others:
        raise judge.NoResultError(place)
    return judge.paired(own, max(others, key=lambda x: statistics.mean(x.values())), place)


@judge.source
def drawn_less_last(variant: str) -> judge.Difference:
    """Returns accuracy with the anomaly's place drawn minus with it last, in points."""
    return judge.paired(_anomalies("drawn")[variant], _anomalies("last")[variant], variant)


@judge.rule
def equivariant(why: str) -> judge.Judgement:
    """Checks that reversing a set reverses its labels, with random weights."""
    rng, holding = np.random.default_rng(0), {}
    x_BTF = rng.normal(size=(1, 6, 8)).astype(np.float32)
    form = {"norm_after": True, "positions": "none", "activation": "relu", "mlp_dim": 32}
    label = nnx.jit(lambda model, x_BTF: model(x_BTF))

    def draw(x):
        return jax.device_put(rng.normal(0, 0.5, x.shape).astype(x.dtype))

    for variant in VARIANTS:
        config = encoders.transformer(variant, 10, 16, 1, 2, labels=1, **form)
        make = functools.partial(Labeller, config, jax.random.key(0), features=8)
        graph, state = nnx.split(nnx.eval_shape(make))
        model = nnx.merge(graph, jax.tree.map(draw, state))
        gap = label(model, x_BTF[:, ::-1]) - label(model, x_BTF)[:, ::-1]
        holding[CALLED[variant]] = bool(abs(gap).max() < 1e-4)
    return judge.cases(holding, why)


# -- the diagonal ----------------------------------------------------------------------------------

_DIAGONAL_LENGTH = 64


@judge.rule
def no_help(margin: float) -> judge.Judgement:
    """Checks that remedies do not help consistently: some change harms, or none has an effect.

    A change harms if its interval over seeds lies below 0, helps if above 0, and has no effect if
    within the margin (in points). If all changes help, the claim is contradicted. Only tasks and
    variants count whose accuracy without a remedy is below 100 % by more than the margin.
    """

    def verdict_on(changes: list[Estimate]) -> str:
        nothing = all(abs(x.mean) + x.half <= margin for x in changes)
        if nothing or any(x.sign < 0 for x in changes):
            return judge.REPRODUCED
        return judge.CONTRADICTED if all(x.sign > 0 for x in changes) else judge.INDISTINCT

    verdicts, parts = [], []
    for remedy, changes in _remedies(margin).items():
        shown = ", ".join(f"{where} {x.shown('+.1f')}" for where, x in changes.items())
        verdicts.append(verdict_on(list(changes.values())))
        parts.append(f"{remedy} ({verdicts[-1]}): {shown}")
    return judge.Judgement(
        judge.combined(verdicts),
        f"{'; '.join(parts)}; points of accuracy, {_DIAGONAL_LENGTH} numbers, margin {margin:g}; "
        f"annealed from {judge.read('diagonal')['hottest']:g} to 1 in half the steps",
    )


def _remedies(margin: float) -> dict[str, dict[str, Estimate]]:
    """Returns changes in points by remedy, then by variant and task."""
    rows = [r for r in judge.read("diagonal")["rows"] if r["length"] == _DIAGONAL_LENGTH]
    for row in rows:
        row["where"] = f"{CALLED[row['variant']]} {row['task']}"
    plain = {row["where"]: 100 * row["right"] for row in rows if row["remedy"] == "none"}
    room = {where for where, right in plain.items() if right < 100 - margin}
    by_remedy: dict[str, dict[str, Estimate]] = {"normalised": {}, "annealed": {}}
    for row in rows:
        if row["remedy"] == "none" or row["where"] not in room:
            continue
        if row["seeds_in_common"] < judge.SEEDS:
            raise judge.NoResultError("diagonal")
        change = Estimate(row["change"], row["change_half_interval"]).times(100)
        by_remedy[row["remedy"]][row["where"]] = change
    if len(room) < 2 or any(changes.keys() != room for changes in by_remedy.values()):
        raise judge.NoResultError("diagonal")
    return by_remedy


# -- padding, section A.1 --------------------------------------------------------------------------


@judge.rule
def padding() -> judge.Judgement:
    """Compares perplexities with and without padding among the targets, in models of bytes."""
    rows = {(r["tie"], r["trained"]): r for r in judge.read("padded_loss")["rows"]}
    if not {("none", "padded"), ("kv", "padded")} <= rows.keys():
        raise judge.NoResultError("padded_loss")
    qkv, tied = rows["none", "padded"], rows["kv", "padded"]
    text, counted = (qkv["perplexity"][name]["mean"] for name in ("text", "counted"))
    cost, cost_counted = (tied["against_first"][name]["percent"] for name in ("text", "counted"))
    return judge.Judgement(
        judge.UNDEFINED,
        f"in models of bytes, where {100 * qkv['share_of_text']:.0f} % of targets are text, "
        f"counting the others turns a perplexity of {text:.2f} into {counted:.2f}, "
        f"and what Q-K=V costs from {cost:.1f} % into {cost_counted:.1f} %",
    )


@judge.source
def packed(tie: str) -> judge.Difference:
    """Returns nats of a model of bytes minus QKV's, trained and evaluated on packed rows."""
    for row in judge.read("padded_loss")["rows"]:
        gap = row["against_first"].get("packed")
        if (row["tie"], row["trained"]) == (tie, "packed") and gap:
            return Estimate(gap["nats"], gap["half_interval"]), row["seeds"]
    raise judge.NoResultError("padded_loss")


@judge.source
def learned(task: str, first: str, second: str) -> judge.Difference:
    """Returns first minus second in points, from `experiments.studies.linear_attention`."""
    runs = judge.read("linear_attention")["runs"]
    first_accuracy, second_accuracy = (
        {seed: 100 * run["figure"] for seed, run in runs.get(f"{task}/{kind}", {}).items()}
        for kind in (first, second)
    )
    return judge.paired(first_accuracy, second_accuracy, task)


@judge.rule
def symmetric(why: str) -> judge.Judgement:
    """Checks that q·k, and the softmax of its rows, are symmetric where q = k (random weights)."""

    def gaps(tie: str) -> tuple[float, float]:
        shape = {"num_heads": 2, "num_kv_heads": 2, "num_bases": 2, "rank": 0}
        config = GroupedConfig(**shape, key_dim=8, value_dim=8, tie=tie)
        mechanism = config.build(16, rngs=nnx.Rngs(0))
        places = rope.positions(np.arange(6)[None], 8, None)
        x_BTD = jax.random.normal(jax.random.key(1), (1, 6, 16))
        q_BTNH, raw = mechanism.project(x_BTD, places)
        k_BTNH, _ = mechanism.keys_values(raw, places)
        z_BNTS = np.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH)
        p_BNTS = np.exp(z_BNTS) / np.exp(z_BNTS).sum(axis=-1, keepdims=True)
        return tuple(float(np.abs(x - x.swapaxes(2, 3)).max()) for x in (z_BNTS, p_BNTS))

    logits, maps = gaps("qk")
    return judge.cases({"logits": logits < 1e-5 < gaps("none")[0], "maps": maps < 1e-5}, why)


@judge.rule
def recurrent(why: str) -> judge.Judgement:
    """Checks `recurrent` and `chunked` against `parallel`, tied, by decay, in float64."""
    holding, chunked = {}, functools.partial(linear.chunked, chunk=16)
    with jax.enable_x64(True):
        z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 100, 2, 8)))
        features = linear.feature_map(z)
        config = linear.LinearConfig(num_heads=2, key_dim=8, value_dim=8, tie="qkv")
        start = config.start(2, z.dtype)
        for decay in (1.0, 0.9):
            all_pairs = jax.jit(linear.parallel)(features, features, z, decay)
            by_token, _ = jax.jit(linear.recurrent)(features, features, z, decay, start)
            by_chunk, _ = jax.jit(chunked)(features, features, z, decay, start)
            gap = max(abs(by_token - all_pairs).max(), abs(by_chunk - all_pairs).max())
            holding[f"decay {decay}"] = bool(gap < 1e-10)
    return judge.cases(holding, why)


# -- from shapes -----------------------------------------------------------------------------------


def _table_8() -> dict[str, float]:
    title = "Projection sharing Table 8: attention's share of multiply-adds"
    return {row["what"]: row["ours"] for row in judge.read("paper_tables")["tables"][title]}


@judge.rule
def savings_grow() -> judge.Judgement:
    """Checks that the % saved of multiply-adds grows with the context's length."""
    lengths, rows = (128, 512, 1024, 2048, 4096), _table_8()
    saved = {
        (name, n): rows[f"{n}, {name}: saved of all"]
        for name in ("Q-K=V", "Q=K=V")
        for n in lengths
    }
    shown = ", ".join(f"{saved['Q-K=V', n]:.1f} at {n}" for n in lengths)
    return judge.cases(
        {
            f"{name} at {longer}": saved[name, longer] > saved[name, shorter]
            for name in ("Q-K=V", "Q=K=V")
            for shorter, longer in itertools.pairwise(lengths)
        },
        f"% saved of multiply-adds, Q-K=V: {shown}; a token saves as many at any length, and "
        "half of its cache",
    )


@judge.rule
def attention_over_half() -> judge.Judgement:
    """Checks that attention takes over 50 % of multiply-adds at 4,096 tokens, in all variants."""
    shares = {
        name.removeprefix("4096, "): share
        for name, share in _table_8().items()
        if name.startswith("4096, ") and "saved" not in name
    }
    ours = ", ".join(f"{name} {share:.1f} %" for name, share in shares.items())
    return judge.cases({name: share > 50 for name, share in shares.items()}, ours)


@judge.rule
def projections(low: float, high: float) -> judge.Judgement:
    """Checks the % of all parameters that are attention's."""
    shares = {}
    for called, size in (("300M", "300m"), ("1.2B", "1p2b")):
        count = formulas.parameters(judge.experiment_of(f"papers.py:qkv_{size}").model)
        shares[called] = 100 * count["attention"] / count["total"]
    return judge.within(shares, low, high, ".1f")
