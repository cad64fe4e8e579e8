"""Rules for claims of logit spectra: spectra of two models, and proofs tested on random numbers."""

import functools

import numpy as np

from experiments.ledger import judge
from kvjax.analysis.measures import logits


def _models() -> dict[str, dict]:
    return judge.read("analysis/logit_spectra")["models"]


@judge.rule
def spectra(
    rows: str,
    figure: list[str],
    low: float,
    high: float,
    of: dict,
    digits: str = "g",
    decimals: int | None = None,
) -> judge.Judgement:
    """Checks that a figure lies in a printed range, by model.

    Args:
      rows: "spectra", "gaps", "attention" or "geometry".
      figure: its keys in a row, from the outermost.
      of: keys and values of the row.
      decimals: the figure is rounded to these before the check; None: it is not.
    """
    figures = {}
    for name, model in _models().items():
        for row in model[rows]:
            if all(row[key] == value for key, value in of.items()):
                number = functools.reduce(dict.__getitem__, figure, row)
                figures[name] = number if decimals is None else round(number, decimals)
    return judge.within(figures, low, high, digits)


@judge.rule
def bound_shrinks() -> judge.Judgement:
    """Checks that the bound (median over heads and texts) is smaller for longer texts."""
    bounds_by_case = {}
    for name, model in _models().items():
        for row in model["attention"]:
            if not row["causal"]:
                by_length = bounds_by_case.setdefault(f"{name}, r = {row['rank']}", {})
                by_length[row["tokens"]] = row["bound"]
    ends = {
        name: (by_length[min(by_length)], by_length[max(by_length)])
        for name, by_length in bounds_by_case.items()
    }
    ours = ", ".join(f"{name}: {first:.0f} to {last:.0f}" for name, (first, last) in ends.items())
    return judge.cases({name: last < first for name, (first, last) in ends.items()}, ours)


@judge.rule
def components_grow() -> judge.Judgement:
    """Checks that E's components for 90 % of the energy grow by at most a tenth with the length."""
    growths = {name: model["growth_with_length"]["E"][1] for name, model in _models().items()}
    shown = ", ".join(f"{name} {growth:.2f} times as many" for name, growth in growths.items())
    return judge.cases(
        {name: growth <= 1.1 for name, growth in growths.items()},
        f"{shown}; components for 90 %, not the variance behind the 20th",
    )


# -- proofs, in random numbers ---------------------------------------------------------------------

_TOKENS, _HEADS, _CHANNELS = 64, 12, 16


@judge.rule
def proposition_4_1() -> judge.Judgement:
    """Checks the bound on softmax in the worst row, separately for each head and rank."""
    rows = worst_rows()
    tightest = min(bound / worst for worst, bound in rows.values())
    return judge.cases(
        {name: worst <= bound for name, (worst, bound) in rows.items()},
        f"random heads and ranks, each by itself; the tightest bound is {tightest:.1f} times the "
        f"worst row's{_medians()}",
    )


def worst_rows() -> dict[str, tuple[float, float]]:
    """Returns |p - p_r|_1 of the worst row and its bound, by head and rank.

    From head to head, the scales of the queries' channels fall off more steeply.
    """
    rng = np.random.default_rng(0)
    steepness_N1 = np.linspace(0, 1.5, _HEADS)[:, None]
    size_NH = 4 * np.arange(1, _CHANNELS + 1) ** -steepness_N1
    query_LNH, key_LNH = rng.normal(size=(2, _TOKENS, _HEADS, _CHANNELS))
    field = logits.centred_logits(query_LNH * size_NH, key_LNH, 1 / np.sqrt(_CHANNELS))
    rows = {}
    for rank in (2, 4, 8):
        bound_N = logits.softmax_bound(field, rank)
        for head in range(_HEADS):
            whole, cut = (softmax(field.truncated(head, r)) for r in (None, rank))
            worst = float(np.abs(whole - cut).sum(axis=1).max())
            rows[f"head {head}, r = {rank}"] = worst, float(bound_N[head])
    return rows


def _medians() -> str:
    """Returns the bound's medians over heads of the measured models; "" without the result."""
    try:
        models = _models()
    except judge.NoResultError:
        return ""
    rows = [row for model in models.values() for row in model["attention"] if not row["causal"]]
    times = min(row["bound"] / row["worst"] for row in rows if row["worst"])
    return (
        f". Of {' and '.join(models)} medians over heads are kept: the bound's is at least "
        f"{times:.0f} times the worst row's and says little"
    )


@judge.rule
def theorem_a_1() -> judge.Judgement:
    """Checks that softmax changes (in the 1-norm) by at most the largest change of a logit."""
    ratios = lipschitz()
    shown = "; ".join(f"{name}: at most {x:.4f} of it" for name, x in ratios.items())
    return judge.cases(
        {name: x <= 1 for name, x in ratios.items()}, f"{shown}, so no smaller factor holds"
    )


def lipschitz() -> dict[str, float]:
    """Returns the largest |softmax(a) - softmax(b)|_1 over |a - b|_inf, by kind of pair."""
    rng = np.random.default_rng(0)
    a_PL = rng.normal(size=(4000, 8)) * rng.choice([0.1, 1, 10], size=(4000, 1))
    step_PL = rng.normal(size=a_PL.shape) * rng.choice([1e-3, 1, 10], size=(4000, 1))

    def ratio(a: np.ndarray, step: np.ndarray) -> float:
        moved = np.abs(softmax(a + step) - softmax(a)).sum(axis=1)
        return float((moved / np.abs(step).max(axis=1)).max())

    even, apart = np.zeros((1, 2)), np.array([[1e-3, -1e-3]])
    return {"4,000 random pairs": ratio(a_PL, step_PL), "two even logits": ratio(even, apart)}


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


@judge.rule
def rank_of_logits() -> judge.Judgement:
    """Checks the rank of row-centred logits of random queries and keys, d_h = 16."""
    q_TH, k_TH = np.random.default_rng(0).normal(size=(2, _TOKENS, _CHANNELS))
    z_TT = q_TH @ k_TH.T
    rank = int(np.linalg.matrix_rank(z_TT - z_TT.mean(axis=1, keepdims=True)))
    return judge.cases(
        {"at most": rank <= _CHANNELS + 1},
        f"rank {rank} of d_h = {_CHANNELS}: row-centring multiplies K by a projection, so d_h is "
        "the tight bound",
    )
