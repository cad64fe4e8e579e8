"""Claims of logit spectra (arXiv 2604.04384) that are proved: tried in random numbers, float64."""

from collections.abc import Callable
import functools

import numpy as np

from experiments.ledger.results import NoResultError, read
from experiments.ledger.verdicts import Cases, Claim
from kvjax.analysis.measures import logits

_TOKENS, _HEADS, _CHANNELS = 64, 12, 16
_RANKS = (2, 4, 8)


@functools.cache
def _field() -> logits.Field:
    """E of random queries and keys; channels fall off more steeply from head to head."""
    rng = np.random.default_rng(0)
    steepness_N1 = np.linspace(0, 1.5, _HEADS)[:, None]
    size_NH = 4 * np.arange(1, _CHANNELS + 1) ** -steepness_N1
    query_LNH, key_LNH = rng.normal(size=(2, _TOKENS, _HEADS, _CHANNELS))
    return logits.field(query_LNH * size_NH, key_LNH, 1 / np.sqrt(_CHANNELS))


def heads() -> dict[str, tuple[float, float]]:
    """By head and rank how far softmax moves in the worst row, |p - p_r|_1, and the bound."""
    found = {}
    for rank in _RANKS:
        bound_N = logits.softmax_bound(_field(), rank)
        for head in range(_HEADS):
            whole, cut = (_softmax(_field().truncated(head, r)) for r in (None, rank))
            worst = float(np.abs(whole - cut).sum(axis=1).max())
            found[f"head {head}, r = {rank}"] = worst, float(bound_N[head])
    return found


def _softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def heads_said() -> str:
    tightest = min(bound / worst for worst, bound in heads().values())
    said = f"random heads and ranks, each by itself; the tightest bound is {tightest:.1f} times "
    return f"{said}the worst row's{_medians()}"


def _medians() -> str:
    """What medians over heads say of the measured models, whose results keep no single heads."""
    try:
        models = read("analysis/logit_spectra")["models"]
    except NoResultError:
        return ""
    rows = [row for model in models.values() for row in model["attention"] if not row["causal"]]
    times = min(row["bound"] / row["worst"] for row in rows if row["worst"])
    return (
        f". Of {' and '.join(models)} medians over heads are kept: the bound's is at least "
        f"{times:.0f} times the worst row's and says little"
    )


def lipschitz() -> dict[str, float]:
    """The largest |softmax(a) - softmax(b)|_1 over |a - b|_inf, by kind of pair."""
    rng = np.random.default_rng(0)
    a_PL = rng.normal(size=(4000, 8)) * rng.choice([0.1, 1, 10], size=(4000, 1))
    step_PL = rng.normal(size=a_PL.shape) * rng.choice([1e-3, 1, 10], size=(4000, 1))
    even, apart = np.zeros((1, 2)), np.array([[1e-3, -1e-3]])
    moved = lambda a, step: np.abs(_softmax(a + step) - _softmax(a)).sum(axis=1)
    ratio = lambda a, step: float((moved(a, step) / np.abs(step).max(axis=1)).max())
    return {"4,000 random pairs": ratio(a_PL, step_PL), "two even logits": ratio(even, apart)}


def rank() -> float:
    """The rank of row-centred logits of random queries and keys of 16 channels."""
    q_TH, k_TH = np.random.default_rng(0).normal(size=(2, 64, 16))
    z_TT = q_TH @ k_TH.T
    return float(np.linalg.matrix_rank(z_TT - z_TT.mean(axis=1, keepdims=True)))


def _at_most(pairs: Callable[[], dict[str, tuple[float, float]]], said: Callable[[], str]) -> Cases:
    return Cases(lambda: {name: x <= most for name, (x, most) in pairs().items()}, said)


CLAIMS = (
    Claim(
        "Proposition 4.1",
        "softmax moves at most by β/√L times the sum of what is cut",
        "",
        _at_most(heads, heads_said),
        "pytest tests/experiments/ledger",
    ),
    Claim(
        "Theorem A.1",
        "softmax moves at most by the largest change of a logit",
        "factor 1",
        Cases(
            lambda: {name: x <= 1 for name, x in lipschitz().items()},
            lambda: (
                "; ".join(f"{name}: at most {x:.4f} of it" for name, x in lipschitz().items())
                + ", so no smaller factor holds"
            ),
        ),
        "pytest tests/experiments/ledger",
    ),
    Claim(
        "section 1",
        "E has rank d_h + 1 at most",
        "d_h + 1",
        Cases(
            lambda: {"at most": rank() <= 17},
            lambda: (
                f"rank {rank():.0f} of d_h = 16: row-centring multiplies K by a projection, so d_h "
                "is the tight bound"
            ),
        ),
        "pytest tests/analysis/measures/test_logits.py",
    ),
)
