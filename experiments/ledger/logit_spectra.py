"""Claims of logit spectra (arXiv 2604.04384)."""

from experiments.ledger import verdicts
from experiments.ledger.verdicts import Cases
from experiments.ledger.verdicts import Claim
from experiments.ledger.verdicts import Computed
from experiments.ledger.verdicts import Elsewhere
from experiments.ledger.verdicts import Undefined

TITLE = "Logit spectra (arXiv 2604.04384)"
_SPECTRA = "python -m experiments.studies.logit_spectra --save"


def _models() -> dict[str, dict]:
    return verdicts.read("analysis/logit_spectra")["models"]


def _gaps(matrix: str) -> Cases:
    """The ratio of components for 90 % of M and of E, by model and length: 5 to 25 as rounded."""

    def found() -> dict[str, dict]:
        return {
            f"{name}, {gap['tokens']} tokens": gap
            for name, model in _models().items()
            for gap in model["gaps"]
            if gap["matrix"] == matrix
        }

    return Cases(
        lambda: {name: gap["verdict"] == "holds" for name, gap in found().items()},
        lambda: ", ".join(f"{name} {gap['ratio']:.1f}" for name, gap in found().items()),
    )


def _components() -> Cases:
    """Components of E for 90 % at 256 tokens, by model: 2 to 11."""

    def found() -> dict[str, float]:
        return {
            name: row["components"]["90%"]["median"]
            for name, model in _models().items()
            for row in model["spectra"]
            if (row["matrix"], row["tokens"]) == ("E", 256)
        }

    return Cases(
        lambda: {name: 2 <= count <= 11 for name, count in found().items()},
        lambda: ", ".join(f"{name} {count:g}" for name, count in found().items()),
    )


def _weights() -> Cases:
    """Components of M for 90 %, by model: 38 to 75; both models have heads of 64."""

    def found() -> dict[str, float]:
        return {
            name: row["components"]["90%"]["median"]
            for name, model in _models().items()
            for row in model["spectra"]
            if row["matrix"].startswith("M") and "distances" not in row["matrix"]
            if row["tokens"] is None
            if "mean" not in row["matrix"]
        }

    return Cases(
        lambda: {name: 38 <= count <= 75 for name, count in found().items()},
        lambda: ", ".join(f"{name} {count:g}" for name, count in found().items()),
    )


def _bound() -> Cases:
    """|p - p_r|_1 stays under the bound: the worst over all heads and texts."""

    def found() -> dict[str, tuple[float, float]]:
        return {
            f"{name}, {row['tokens']} tokens, r = {row['rank']}": (row["worst"], row["bound"])
            for name, model in _models().items()
            for row in model["attention"]
        }

    def figures() -> str:
        tightest = min(bound / worst for worst, bound in found().values() if worst)
        return f"the bound is at least {tightest:.0f} times the worst that was seen"

    return Cases(lambda: {n: worst <= bound for n, (worst, bound) in found().items()}, figures)


def _beta() -> Cases:
    """The spread of right singular vectors: at most 14."""

    def found() -> dict[str, float]:
        return {
            f"{name}, {row['tokens']} tokens": row["beta_most"]
            for name, model in _models().items()
            for row in model["geometry"]
        }

    return Cases(
        lambda: {name: most <= 14 for name, most in found().items()},
        lambda: ", ".join(f"{name} {most:.1f}" for name, most in found().items()),
    )


def _growth() -> Cases:
    """From 64 to the longest texts E needs more components: "no growth in the tail"."""

    def found() -> dict[str, float]:
        return {name: model["growth_with_length"]["E"][1] for name, model in _models().items()}

    return Cases(
        lambda: {name: growth <= 1.1 for name, growth in found().items()},
        lambda: ", ".join(f"{name} {growth:.2f} times as many" for name, growth in found().items()),
    )


def _rank() -> float:
    """Of row-centred logits of random queries and keys, heads of 16."""
    import numpy as np

    q_TH, k_TH = np.random.default_rng(0).normal(size=(2, 64, 16))
    z_TT = q_TH @ k_TH.T
    return float(np.linalg.matrix_rank(z_TT - z_TT.mean(axis=1, keepdims=True)))


def _heads() -> int:
    """Query heads of the models that section 3 lists."""
    return 144 + 512 + 672 + 576 + 1024


CLAIMS = (
    Claim(
        "Table 2; abstract",
        "logits on a text need 2 to 11 components for 90 %",
        "2-11",
        _components(),
        _SPECTRA,
    ),
    Claim("Table 2; abstract", "the weights' M needs 38 to 75", "38-75", _weights(), _SPECTRA),
    Claim(
        "Table 2; abstract", "a gap of 5 to 25 times, over all keys", "5-25x", _gaps("E"), _SPECTRA
    ),
    Claim(
        "Table 2; abstract", "the same under the causal mask", "5-25x", _gaps("E, causal"), _SPECTRA
    ),
    Claim(
        "Table 1",
        "cumulative shares for five models",
        "",
        Elsewhere(
            "GPT-2, LLaMA-3.2, Qwen-2.5 and Mistral; two other models stand in "
            "experiments/README.md"
        ),
        _SPECTRA,
    ),
    Claim(
        "Proposition 4.1",
        "softmax moves at most by β/√L times the sum of what is cut",
        "",
        _bound(),
        _SPECTRA,
    ),
    Claim("section 4", "β is at most 14", "2.5-5.6, at most 14", _beta(), _SPECTRA),
    Claim("section 4", "no growth from 64 to 1,024 tokens", "", _growth(), _SPECTRA),
    Claim(
        "abstract",
        "5,888 KV heads in five models",
        "5,888",
        Computed(
            "5,888",
            lambda: float(_heads()),
            "query heads of the listed models; their KV heads are fewer",
        ),
        "",
    ),
    Claim(
        "section 4",
        "at r = 20 the tail is 2 % of the variance",
        "2 %",
        Undefined("Table 1 has 1 to 4 % there, by model"),
        "",
    ),
    Claim(
        "section 4.1",
        "a flat spectrum of M rules out compression by weights",
        "",
        Undefined(
            "thin keys' Table 5 and LRKV's section 4 compress by weights; what is ruled out is "
            "not said. Measured: experiments/README.md, Converted models"
        ),
        "python -m experiments.studies.conversion",
    ),
    Claim(
        "section 1",
        "E can have rank d_h + 1",
        "d_h + 1",
        Computed("17", _rank, "of d_h = 16: row-centring multiplies K by a projection"),
        "pytest tests/analysis/test_logits.py",
    ),
)
