"""Rules for claims of projection sharing that small models answer: tasks, images, sets, A.1."""

from experiments.ledger import verdicts
from experiments.ledger.verdicts import Cases
from experiments.ledger.verdicts import Differs
from experiments.ledger.verdicts import NoResultError
from kvjax.foundation.estimate import Estimate
from kvjax.foundation.estimate import difference

_ENCODERS = "a sample of the paper's grid"


def table_2(task: str, first: str, second: str):
    """First less second in points of accuracy, seed by seed, means over cells."""

    def of() -> tuple[Estimate, int]:
        runs = verdicts.read("sequence_tasks")["runs"]

        def by_seed(variant: str) -> dict[int, float]:
            mine = [seeds for name, seeds in runs.items() if name.startswith(f"{task}/{variant}/")]
            common = set.intersection(*map(set, mine)) if mine else set()
            return {
                int(seed): 100 * sum(cell[seed]["right"] for cell in mine) / len(mine)
                for seed in common
            }

        one, other = by_seed(first), by_seed(second)
        found = difference(one, other)
        if found is None:
            raise NoResultError(task)
        return found, len(one.keys() & other.keys())

    return of


def tells(task: str, first: str, second: str, sign: int) -> Differs:
    return Differs(table_2(task, first, second), sign, "+.2f", f"points of accuracy, {_ENCODERS}")


def all_right(task: str) -> Cases:
    """Every variant labels at least 99.95 % of the positions: 1.000 as printed."""

    def of() -> dict[str, float]:
        rows = verdicts.read("sequence_tasks")["rows"]
        return {r["variant"]: r["tasks"][task]["right"] for r in rows if task in r["tasks"]}

    def figures() -> str:
        return ", ".join(f"{name} {right:.3f}" for name, right in of().items())

    return Cases(lambda: {name: right >= 0.9995 for name, right in of().items()}, figures)


def image(name: str, variant: str):
    """A variant less QKV in points of accuracy."""

    def of() -> tuple[Estimate, int]:
        for row in verdicts.read(f"images/{name}")["rows"]:
            if row["variant"] == variant and row["from_qkv"] is not None:
                off = Estimate(row["from_qkv"], row["from_qkv_half_interval"])
                return off.times(100), row["seeds"]
        raise NoResultError(name)

    return of


_VARIANTS = ("qk_tied", "qk_tied_plus", "kv_tied", "qkv_tied", "qkv_tied_plus")


def within_a_point(name: str, variants: tuple[str, ...] = _VARIANTS) -> Cases:
    """Means less QKV's, of at least as many seeds as a claim needs."""

    def of() -> dict[str, Estimate]:
        found = {variant: image(name, variant)() for variant in variants}
        if any(seeds < verdicts.SEEDS for _, seeds in found.values()):
            raise NoResultError(name)
        return {variant: estimate for variant, (estimate, _) in found.items()}

    def figures() -> str:
        return ", ".join(f"{variant} {x.shown('+.2f')}" for variant, x in of().items())

    return Cases(lambda: {variant: abs(x.mean) <= 1 for variant, x in of().items()}, figures)


def anomaly(place: str):
    """(Q=K-V)+ less QKV in points of accuracy, means over cells, seed by seed."""

    def of() -> tuple[Estimate, int]:
        runs = verdicts.read("set_anomaly")["runs"]

        def by_seed(variant: str) -> dict[str, float]:
            mine = [r for name, r in runs.items() if name.startswith(f"{place}/{variant}/")]
            common = set.intersection(*map(set, mine)) if mine else set()
            return {
                seed: 100 * sum(cell[seed]["right"] for cell in mine) / len(mine) for seed in common
            }

        one, other = by_seed("qk_tied_plus"), by_seed("qkv")
        found = difference(one, other)
        if found is None:
            raise NoResultError(place)
        return found, len(one.keys() & other.keys())

    return of


def symmetric() -> dict[str, bool]:
    """Whether q·k of two positions is k·q, before the softmax, in random weights."""
    import jax
    import numpy as np

    from kvjax.attention import GroupedConfig
    from kvjax.layers import rope

    def gap(tie: str) -> float:
        shape = dict(num_heads=2, num_kv_heads=2, num_bases=2, rank=0, key_dim=8, value_dim=8)
        mechanism = GroupedConfig(**shape, tie=tie).build(16, rngs=rngs())
        places = rope.positions(np.arange(6)[None], 8, None)
        x_BTD = jax.random.normal(jax.random.key(1), (1, 6, 16))
        q_BTNH, raw = mechanism.project(x_BTD, places)
        k_BTNH, _ = mechanism.keys_values(raw, places)
        z_BNTS = np.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH)
        return float(np.abs(z_BNTS - z_BNTS.swapaxes(2, 3)).max())

    return {"Q=K-V": gap("qk") < 1e-5, "QKV is not": gap("none") > 1e-2}


def apart() -> dict[str, float]:
    """How far recurrence and chunks are from all pairs of tokens, tied, by decay, in float64."""
    import jax
    import numpy as np

    from kvjax.attention import linear

    found = {}
    with jax.enable_x64(True):
        z = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 100, 2, 8)))
        features = linear.feature_map(z)
        for decay in (1.0, 0.9):
            config = linear.LinearConfig(num_heads=2, key_dim=8, value_dim=8, tie="qkv")
            start = config.start(2, z.dtype)
            whole = linear.parallel(features, features, z, decay)
            one, _ = linear.recurrent(features, features, z, decay, start)
            few, _ = linear.chunked(features, features, z, decay, start, chunk=16)
            found[f"decay {decay}"] = float(max(abs(one - whole).max(), abs(few - whole).max()))
    return found


def forms() -> dict[str, bool]:
    return {name: gap < 1e-10 for name, gap in apart().items()}


def forms_said() -> str:
    return "in float64 the forms differ by less than 1e-10; the state is S and one vector a head"


def learned(task: str, first: str, second: str):
    """First less second in points, seed by seed, of `experiments.studies.linear_attention`."""

    def of() -> tuple[Estimate, int]:
        runs = verdicts.read("linear_attention")["runs"]
        by_seed = lambda kind: {
            seed: 100 * run["figure"] for seed, run in runs.get(f"{task}/{kind}", {}).items()
        }
        one, other = by_seed(first), by_seed(second)
        found = difference(one, other)
        if found is None:
            raise NoResultError(task)
        return found, len(one.keys() & other.keys())

    return of


def rngs():
    from flax import nnx

    return nnx.Rngs(0)
