"""Claims of logit spectra (arXiv 2604.04384)."""

from collections.abc import Callable, Mapping
import functools

from experiments.ledger import logit_spectra_proved
from experiments.ledger.out_of_reach import Elsewhere
from experiments.ledger.results import read
from experiments.ledger.verdicts import Cases, Claim, Computed, OfItself, Rule, within

TITLE = "Logit spectra (arXiv 2604.04384)"
_SPECTRA = "python -m experiments.studies.logit_spectra --save"


def _models() -> dict[str, dict]:
    return read("analysis/logit_spectra")["models"]


_AT = 256  # tokens, as in the paper's tables


def _by_model(rows: str, figure: Callable[[dict], float], **of) -> Callable[[], dict[str, float]]:
    """By model a figure of the row of its `rows` that is `of`."""

    def found() -> dict[str, float]:
        return {
            name: figure(row)
            for name, model in _models().items()
            for row in model[rows]
            if all(row[key] == value for key, value in of.items())
        }

    return found


def _components(row: dict, threshold: str = "90%") -> float:
    return row["components"][threshold]["median"]


def _thresholds(ranges: Mapping[str, tuple[int, int]], **of) -> dict[str, Rule]:
    """By share of the variance, whether components lie in what Table 2 has."""
    return {
        f"{share} %": within(
            _by_model("spectra", functools.partial(_components, threshold=f"{share}%"), **of), *ends
        )
        for share, ends in ranges.items()
    }


def _ratios(row: dict) -> float:
    return round(row["ratio"], 1)


def _errors(rank: int, measure: str, low: float, high: float) -> Cases:
    """|p - p_r|_1 of a rank at 256 tokens over all keys: of the mean or of the worst row."""
    asked = dict(tokens=_AT, causal=False, rank=rank)
    return within(_by_model("attention", lambda row: row[measure], **asked), low, high, ".2f")


def _between_texts(row: dict) -> float:
    return row["components"]["90%"]["between_texts"]


def _shrinks() -> Cases:
    """The bound, medians over heads and texts, of the longest texts against 64 tokens."""

    def found() -> dict[str, tuple[float, float]]:
        bounds: dict[str, dict[int, float]] = {}
        for name, model in _models().items():
            for row in model["attention"]:
                if not row["causal"]:
                    of = bounds.setdefault(f"{name}, r = {row['rank']}", {})
                    of[row["tokens"]] = row["bound"]
        return {name: (of[min(of)], of[max(of)]) for name, of in bounds.items()}

    return Cases(
        lambda: {name: last < first for name, (first, last) in found().items()},
        lambda: ", ".join(
            f"{name}: {first:.0f} to {last:.0f}" for name, (first, last) in found().items()
        ),
    )


def _growth() -> Cases:
    """From 64 to the longest texts: components of E for 90 %, at most a tenth more."""

    def found() -> dict[str, float]:
        return {name: model["growth_with_length"]["E"][1] for name, model in _models().items()}

    return Cases(
        lambda: {name: growth <= 1.1 for name, growth in found().items()},
        lambda: (
            ", ".join(f"{name} {growth:.2f} times as many" for name, growth in found().items())
            + "; components for 90 %, not the variance behind the 20th"
        ),
    )


# Behind the 20th component, in Table 1.
_TAILS = {"GPT-2": 1, "LLaMA-1B": 2, "LLaMA-3B": 4, "Qwen-3B": 4, "Mistral-7B": 4}


def _heads() -> int:
    """Query heads of the models that section 3 lists."""
    return 144 + 512 + 672 + 576 + 1024


# Components of E for 90 %, as Table 2 prints them; heads of 64 and of 128.
_SMALL_HEADS = ("GPT-2 (64)", "LLaMA-1B (64)")
# Components for 90 %, of E and of M, heads of 64 and of 128.
_GENERATED = dict(zip(_SMALL_HEADS, (2, 8), strict=True))
_GENERATED |= {"LLaMA-3B (128)": 11, "Qwen-3B (128)": 11, "Mistral-7B (128)": 10}
_LEARNED = dict(zip(_GENERATED, (49, 38, 75, 70, 66), strict=True))
_NARROW, _WIDE = ([n for name, n in _LEARNED.items() if f"({d})" in name] for d in (64, 128))
_FLAT = [(n, 64) for n in _NARROW] + [(n, 128) for n in _WIDE]
_FIVE = "GPT-2, LLaMA-3.2 (1B, 3B), Qwen-2.5-3B and Mistral-7B"


def _own_gaps() -> dict[str, bool]:
    """Whether ratios are those of Table 2's medians, to whole numbers."""
    times = {name: _LEARNED[name] / of_e for name, of_e in _GENERATED.items()}
    near = lambda name, stated: abs(times[name] - stated) <= 0.5
    found = {"5": near("LLaMA-1B (64)", 5), "25": near("GPT-2 (64)", 25)}
    return found | {name: 6 <= x <= 7 for name, x in times.items() if "128" in name}


def _own_gaps_said() -> str:
    times = (f"{name} {_LEARNED[name] / of_e:.1f}" for name, of_e in _GENERATED.items())
    return ", ".join(times)


def _elsewhere(seen: Rule | Mapping[str, Rule]) -> Elsewhere:
    return Elsewhere(_FIVE, seen, "in SmolLM2-135M and Whisper's decoder, heads of 64,")


CLAIMS = (
    Claim(
        "Table 2; abstract",
        "logits on a text need 2 to 11 components for 90 %",
        "2-11",
        _elsewhere(within(_by_model("spectra", _components, matrix="E", tokens=_AT), 2, 11)),
        _SPECTRA,
    ),
    Claim(
        "Table 2; abstract",
        "the weights' M needs 38 to 75; heads of 64 38 and 49",
        "38-75",
        _elsewhere(
            within(_by_model("spectra", _components, matrix="M, without RoPE", tokens=None), 38, 75)
        ),
        _SPECTRA,
    ),
    Claim(
        "Table 2; abstract",
        "a gap of 5 to 25 times, over all keys, at 256 tokens",
        "5-25x",
        _elsewhere(within(_by_model("gaps", _ratios, matrix="E", tokens=_AT), 5, 25)),
        _SPECTRA,
    ),
    Claim(
        "Table 2",
        "components of E for 80, 95 and 99 %",
        "2-5, 4-18, 18-40",
        _elsewhere(
            _thresholds({"80": (2, 5), "95": (4, 18), "99": (18, 40)}, matrix="E", tokens=_AT)
        ),
        _SPECTRA,
    ),
    Claim(
        "Table 2",
        "components of M for 80, 95 and 99 %, of heads of 64",
        "29-40, 44-55, 54-61",
        _elsewhere(
            _thresholds(
                {"80": (29, 40), "95": (44, 55), "99": (54, 61)},
                matrix="M, without RoPE",
                tokens=None,
            )
        ),
        _SPECTRA,
    ),
    Claim(
        "Table 2; section 3",
        "the gap is 5 times (LLaMA-1B) to 25 times (GPT-2), 6 to 7 times in heads of 128",
        "5x, 25x; 6-7x",
        OfItself(Cases(_own_gaps, _own_gaps_said)),
    ),
    Claim(
        "section 3",
        "the three larger models use grouped query attention, where query heads share keys",
        "LLaMA-3.2-3B, Qwen-2.5-3B, Mistral-7B",
        Elsewhere("those models' configs; the paper prints one number of heads for each"),
    ),
    Claim(
        "section 4.3",
        "β does not grow with the size of models or heads",
        "",
        Elsewhere(f"{_FIVE}; the two at hand have heads of 64"),
        _SPECTRA,
    ),
    Claim(
        "Table 1",
        "cumulative shares for five models",
        "",
        Elsewhere(f"{_FIVE}; two other models stand in reports/analysis.md"),
        _SPECTRA,
    ),
    Claim(
        "section 4.2",
        "the learned spectrum of M is flat in every case",
        "",
        OfItself(
            Cases(
                lambda: {f"{n} of {d}": n >= 0.9 * 0.9 * d for n, d in _FLAT},
                lambda: (
                    "components for 90 %; a flat spectrum takes 90 % of a head's channels, here "
                    "asked with a tenth off"
                ),
            )
        ),
        "",
    ),
    Claim(
        "section 4.2",
        "E's components vary by at most 1 across texts, σ < 1.2",
        "σ < 1.2",
        _elsewhere(
            within(_by_model("spectra", _between_texts, matrix="E", tokens=_AT), 0, 1.2, ".2f")
        ),
        _SPECTRA,
    ),
    Claim(
        "section 4.3",
        "Proposition 4.1's bound shrinks with the context's length",
        "1/√L",
        _elsewhere(_shrinks()),
        _SPECTRA,
    ),
    Claim(
        "Table 2; section 4.2",
        "twice the channels of a head roughly double the components of M",
        "38 and 49; 75, 70 and 66",
        OfItself(
            within(
                lambda: {
                    f"{wide} of {narrow}": wide / narrow for wide in _WIDE for narrow in _NARROW
                },
                1.5,
                2.5,
                ".2f",
            )
        ),
        "",
    ),
    Claim(
        "Table 2; section 4.2",
        "twice the channels of a head leave E at 10 to 11 components",
        "10-11",
        OfItself(
            Cases(
                lambda: {"heads of 64": all(10 <= _GENERATED[name] <= 11 for name in _SMALL_HEADS)},
                lambda: "Table 2 itself: " + ", ".join(f"{m} {n}" for m, n in _GENERATED.items()),
            )
        ),
        "",
    ),
    *logit_spectra_proved.CLAIMS,
    *(
        Claim(
            "section 4.3",
            f"at r = {rank} softmax moves by {printed}, {name}",
            printed,
            _elsewhere(_errors(rank, measure, low, high)),
            _SPECTRA,
        )
        for measure, name, ranges in (
            ("mean", "mean of rows", ((10, 0.31, 0.46), (20, 0.18, 0.29), (40, 0.05, 0.14))),
            ("worst", "worst row", ((10, 0.90, 1.31), (20, 0.52, 0.84), (40, 0.16, 0.39))),
        )
        for rank, low, high in ranges
        for printed in (f"{low:.2f}-{high:.2f}",)
    ),
    Claim(
        "section 4.3",
        "β is at most 14 at 256 tokens",
        "at most 14",
        _elsewhere(
            within(_by_model("geometry", lambda r: r["beta_most"], tokens=_AT), 0, 14, ".1f")
        ),
        _SPECTRA,
    ),
    Claim(
        "section 4.3",
        "its median over singular vectors is 2.5 to 5.6",
        "2.5-5.6",
        _elsewhere(
            within(_by_model("geometry", lambda r: r["of_vectors"], tokens=_AT), 2.5, 5.6, ".1f")
        ),
        _SPECTRA,
    ),
    Claim(
        "section 4.2",
        "keys' incoherence is about 2",
        "2",
        _elsewhere(
            within(_by_model("geometry", lambda r: r["incoherence"], tokens=_AT), 1.5, 2.5, ".1f")
        ),
        _SPECTRA,
    ),
    Claim(
        "section 4.3",
        "no growth in the tail from 64 to 1,024 tokens",
        "",
        _elsewhere(_growth()),
        _SPECTRA,
    ),
    Claim(
        "abstract",
        "5,888 KV heads in five models",
        "5,888",
        OfItself(
            Computed(
                "5,888",
                lambda: float(_heads()),
                "query heads of the listed models; their KV heads are fewer",
            )
        ),
        "",
    ),
    Claim(
        "section 4.3",
        "at r = 20 the tail is 2 % of the variance",
        "2 %",
        OfItself(
            Cases(
                lambda: {name: tail == 2 for name, tail in _TAILS.items()},
                lambda: "Table 1 has " + ", ".join(f"{name} {x} %" for name, x in _TAILS.items()),
            )
        ),
        "",
    ),
    Claim(
        "section 5",
        "a flat spectrum of M rules out fixed projections: only what adapts to data compresses",
        "",
        Elsewhere(
            "these models; thin keys' Tables 5 to 7 and LRKV compress with fixed projections, and "
            "so do converted models in reports/conversion.md"
        ),
        "python -m experiments.studies.conversion",
    ),
)
