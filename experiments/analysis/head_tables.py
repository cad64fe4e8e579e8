"""Tables of measurements of heads over models and seeds, compared with LRKV's table 5.

`experiments.studies.head_diversity` trains and measures them.
"""

from collections.abc import Callable, Mapping
import dataclasses

from experiments.analysis import seeds as seeds_lib
from experiments.analysis.numbers import Numbers
from experiments.analysis.seeds import Estimate, Pair
from kvjax.analysis.reports.diversity.report import PUBLISHED
from kvjax.foundation.intervals import difference, estimate
from kvjax.foundation.output import Table

# First words of the paper's rows by mechanism. In the paper and here, LRKV's residuals have half a
# head's channels as their rank, and GQA (128M) has half as many KV heads as heads. The paper's MLA
# has no RoPE key (its cache is the latent alone), so `mla` is not in the table.
ROWS = {
    "mha": "MHA",
    "lrkv": "LRKV, rank 64",
    "gqa": "GQA",
    "mqa": "MQA",
    "mla_paper": "MLA",
}
SCALES = ("128M", "2.5B")
FIRST = "mha"  # the reference
RANKS = {"share": "not centred", "centred_share": "centred"}  # as table 5 has them, % of N


@dataclasses.dataclass(frozen=True)
class Run:
    """Measurements of a run.

    Attributes:
      trained, untrained: numbers at the last step and of the initial weights.
      steps: effective ranks by step.
    """

    bits_per_byte: float
    trained: Numbers
    untrained: Numbers
    steps: dict[int, Numbers]


Runs = dict[str, dict[int, Run]]  # runs by mechanism and seed


class Findings:
    """Measurements of all runs, reduced to the numbers of the tables."""

    def __init__(self, runs: Runs, names: Mapping[str, str]):
        self.runs, self.names = runs, names

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return tuple(self.runs)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for runs in self.runs.values() for seed in runs})

    def by_seed(self, mechanism: str, pick: Callable[[Run], float | None]) -> dict[int, float]:
        """Returns a number by seed, for the runs that have it."""
        numbers = {seed: pick(run) for seed, run in self.runs[mechanism].items()}
        return {seed: number for seed, number in numbers.items() if number is not None}

    def estimate(self, mechanism: str, pick: Callable[[Run], float | None]) -> Estimate | None:
        numbers = self.by_seed(mechanism, pick)
        return estimate(list(numbers.values())) if numbers else None

    def against_first(self, mechanism: str, pick: Callable[[Run], float | None]) -> Estimate | None:
        """Returns the difference from MHA, paired by seed; None for MHA itself and without it."""
        if mechanism == FIRST or FIRST not in self.runs:
            return None

        return difference(self.by_seed(mechanism, pick), self.by_seed(FIRST, pick))

    def pairs(self, scale: str, name: str) -> list[Pair]:
        """Returns the pairs of table 5's order at a scale, with the differences of these runs."""
        measured = {m: self.by_seed(m, _of(name)) for m in self.runs}
        return seeds_lib.pairs(published(scale, name), measured)


def _of(name: str, *, untrained: bool = False) -> Callable[[Run], float | None]:
    """Returns a function that picks a number of a run."""
    return lambda run: (run.untrained if untrained else run.trained).get(name)


def _learned(name: str) -> Callable[[Run], float | None]:
    """Returns a function that picks the change of a number in training."""
    return lambda run: run.trained[name] - run.untrained[name]


def published(scale: str, name: str) -> dict[str, float]:
    """Returns a column of LRKV's table 5 by mechanism, in % of N."""
    column = 3 if name == "share" else 4

    def figure_of(row_start):
        rows = (row for row in PUBLISHED if row[1] == scale and row[0].startswith(row_start))
        return next(rows)[column]

    return {mechanism: figure_of(row_start) for mechanism, row_start in ROWS.items()}


def _cell(estimate: Estimate | None, digits: str = ".2f") -> str:
    return "-" if estimate is None else estimate.shown(digits)


def tables(findings: Findings) -> list[Table]:
    ranks = [_ranks(findings), _against(findings), _order(findings), _over_steps(findings)]
    return [*ranks, _spectra(findings), _patterns(findings)]


def _ranks(findings: Findings) -> Table:
    rows = []
    for name in findings.mechanisms:
        row = [name, findings.names[name]]
        for measure in ("share", "centred_share", "centred_share_of_possible"):
            row.append(_cell(findings.estimate(name, _of(measure))))
        for measure in ("share", "centred_share_of_possible"):
            row.append(_cell(findings.estimate(name, _of(measure, untrained=True))))
        of_paper = (published("128M", measure).get(name) for measure in RANKS)
        rows.append([*row, *("-" if x is None else f"{x:.1f}" for x in of_paper)])
    header = ("config", "mechanism", "not centred, % of N", "centred, % of N")
    header += ("centred, % of N - 1", "not centred, before training")
    header += ("centred, % of N - 1, before training", "not centred, paper at 128M")
    header += ("centred, % of N, paper at 128M",)
    return Table(
        "Effective rank of heads' forms W_Q W_K^T, means over layers, seeds and 95 % intervals",
        header,
        rows,
        (
            "4 heads here, so that centred % of N is at most 75; 6 heads in the paper (83.3). Its "
            "row for GQA is marked as estimated. Only orders may be compared.",
        ),
    )


def _against(findings: Findings) -> Table:
    rows = []
    measures = ("share", "centred_share_of_possible", "share_with_rope", "share_of_values")
    for name in findings.mechanisms:
        if name == FIRST:
            continue
        row = [name]
        for measure in measures:
            row.append(_cell(findings.against_first(name, _of(measure)), "+.2f"))
        row.append(_cell(findings.against_first(name, _of("share", untrained=True)), "+.2f"))
        row.append(_cell(findings.against_first(name, _learned("share")), "+.2f"))
        rows.append(row)
    header = ("config", "not centred", "centred, % of N - 1", "not centred, with RoPE")
    header += ("of values, not centred", "not centred, before training")
    header += ("not centred, change in training",)
    return Table(
        "Against MHA, seed by seed: points of percent, with 95 % intervals",
        header,
        rows,
        (
            "With RoPE: similarities averaged over relative positions. Of values: forms W_V W_O. "
            "The last two columns add up to the first.",
        ),
    )


def _order(findings: Findings) -> Table:
    rows = []
    for name, label in RANKS.items():
        small, large = (findings.pairs(scale, name) for scale in SCALES)
        small_pairs = {(pair.first, pair.second): pair for pair in small}
        for pair in large:
            same_order = small_pairs.get((pair.first, pair.second))
            reverse = same_order or small_pairs[pair.second, pair.first]
            at_small = reverse.published if same_order else -reverse.published
            rows.append(
                (
                    label,
                    f"{pair.first} over {pair.second}",
                    pair.here.shown("+.3f"),
                    *(f"{x:+.1f}" for x in (at_small, pair.published)),
                    *(p.verdict for p in (reverse, pair)),
                )
            )
    header = ("effective rank", "pair", "here", *(f"paper, {scale}" for scale in SCALES))
    return Table(
        "The paper's orders (table 5) against these runs",
        (*header, *(f"the order at {scale}" for scale in SCALES)),
        rows,
        (
            "Here: paired differences with 95 % intervals, in points of N; distinguishable if an "
            "interval excludes 0. Intervals are not corrected for the number of comparisons: of "
            "twenty equal pairs, one is expected to appear distinguishable.",
        ),
    )


def _over_steps(findings: Findings) -> Table:
    steps = sorted(
        {s for runs in findings.runs.values() for run in runs.values() for s in run.steps}
    )

    def at(step):
        return lambda run: run.steps.get(step, {}).get("share")

    rows = [
        [m, *(_cell(findings.estimate(m, at(step))) for step in steps)] for m in findings.mechanisms
    ]
    return Table(
        "Effective rank over training, not centred, % of N",
        ("config", *(f"step {step}" for step in steps)),
        rows,
    )


Columns = tuple[tuple[str, bool, str, str], ...]  # number, whether before training, title, digits
_SPECTRA: Columns = (
    ("components_of_m", False, "M", ".1f"),
    ("components_of_e", False, "E", ".1f"),
    ("components_of_e_without_rope", False, "E without RoPE", ".1f"),
    ("components_of_e_causal", False, "E causal", ".1f"),
    ("m_over_e", False, "M over E", ".2f"),
    ("components_of_m", True, "M, before training", ".1f"),
    ("components_of_e", True, "E, before training", ".1f"),
    ("components_of_e_without_rope", True, "E without RoPE, before training", ".1f"),
    ("half_rank_by_weights", False, "half rank by weights, % perplexity", ".2f"),
    ("half_rank_by_text", False, "half rank by text, % perplexity", ".2f"),
)
_PATTERNS: Columns = (
    ("divergence", False, "divergence of heads, nats", ".3f"),
    ("divergence", True, "divergence, before training", ".3f"),
    ("cka_of_outputs", False, "CKA of outputs", ".3f"),
    ("cka_of_outputs", True, "CKA, before training", ".3f"),
    ("entropy", False, "entropy", ".3f"),
    ("first", False, "on the first token", ".3f"),
    ("previous", False, "on the token before", ".3f"),
    ("key_overlap", False, "residual in base", ".3f"),
    ("key_overlap", True, "residual in base, before training", ".3f"),
)


def _numbers(findings: Findings, m: str, columns: Columns) -> list[str]:
    return [
        _cell(findings.estimate(m, _of(name, untrained=untrained)), digits)
        for name, untrained, _, digits in columns
    ]


def _spectra(findings: Findings) -> Table:
    return Table(
        "Components for 90 % of the energy, and the cost of keys of half rank",
        ("config", *(title for _, _, title, _ in _SPECTRA)),
        [[m, *_numbers(findings, m, _SPECTRA)] for m in findings.mechanisms],
        (
            "Medians over heads of M = W_Q W_K^T and of the logits E of 256 tokens; half rank: "
            "perplexity added by keys of half their rank in all layers, by an SVD of each head's "
            "weights and by a subspace from other text.",
        ),
    )


def _patterns(findings: Findings) -> Table:
    rows = []
    for m in findings.mechanisms:
        bits = findings.estimate(m, lambda run: run.bits_per_byte)
        rows.append([m, _cell(bits, ".4f"), *_numbers(findings, m, _PATTERNS)])
    return Table(
        "Attention patterns",
        ("config", "bits per byte", *(title for _, _, title, _ in _PATTERNS)),
        rows,
        (
            "Divergence: Jensen-Shannon, of the patterns of two heads of a layer (ln 2 = 0.693 at "
            "most). Entropy: of a pattern, relative to uniform attention. Residual in base: share "
            "of the input subspace of LRKV's residuals that their base reads too.",
        ),
    )


def verdicts(findings: Findings) -> list[str]:
    """Returns a sentence on each of the paper's orders."""
    sentences = []
    for name, label in RANKS.items():
        for scale in SCALES:
            if pairs := findings.pairs(scale, name):
                verdict = seeds_lib.in_words(pairs)
                sentences.append(f"Neighbours in the order at {scale}, {label}: {verdict}.")
    return sentences


def as_json(findings: Findings) -> dict:
    """Returns all numbers, estimates and verdicts, JSON-able."""
    estimates = {}
    for m in findings.mechanisms:
        names = sorted({name for run in findings.runs[m].values() for name in run.trained})
        estimates[m] = {}
        for name in names:
            against = _plain(findings.against_first(m, _of(name)))
            estimates[m][name] = _plain(findings.estimate(m, _of(name))) | {"against_mha": against}
    orders = [
        dict(scale=scale, measure=name, verdict=pair.verdict) | dataclasses.asdict(pair)
        for name in RANKS
        for scale in SCALES
        for pair in findings.pairs(scale, name)
    ]
    return dict(
        seeds=findings.seeds,
        mechanisms=dict(findings.names),
        orders=orders,
        verdicts=verdicts(findings),
        estimates=estimates,
        published={s: {name: published(s, name) for name in RANKS} for s in SCALES},
        runs={
            m: {seed: dataclasses.asdict(run) for seed, run in runs.items()}
            for m, runs in findings.runs.items()
        },
    )


def _plain(estimate: Estimate | None) -> dict | None:
    return None if estimate is None else dict(mean=estimate.mean, half_interval=estimate.half)
