"""Claims of projection sharing that its text makes of its own tables."""

import math
import statistics

from experiments.ledger import rounded
from experiments.ledger.verdicts import Cases, Claim, Computed, OfItself

# Accuracies, and what is called their mean: reverse, sort, sub, swap and copy.
_TABLE_2 = {
    "QKV": (("0.698", "0.971", "1.0", "0.588", "1.0"), "0.851"),
    "Q=K-V": (("0.705", "0.967", "1.0", "0.597", "1.0"), "0.854"),
    "(Q=K-V)+": (("0.718", "0.963", "1.0", "0.671", "1.0"), "0.870"),
    "Q-K=V": (("0.701", "0.958", "1.0", "0.590", "1.0"), "0.850"),
    "Q=K=V": (("0.514", "0.939", "1.0", "0.446", "1.0"), "0.780"),
    "(Q=K=V)+": (("0.581", "0.957", "1.0", "0.576", "1.0"), "0.823"),
}
# MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and anomaly.
_TABLE_3 = {
    "QKV": (("0.981", "0.887", "0.663", "0.363", "0.942"), "0.767"),
    "Q=K-V": (("0.981", "0.885", "0.666", "0.369", "0.954"), "0.771"),
    "(Q=K-V)+": (("0.982", "0.884", "0.662", "0.366", "0.966"), "0.772"),
    "Q-K=V": (("0.976", "0.883", "0.659", "0.358", "0.949"), "0.767"),
    "Q=K=V": (("0.978", "0.877", "0.672", "0.376", "0.933"), "0.767"),
    "(Q=K=V)+": (("0.977", "0.875", "0.669", "0.364", "0.961"), "0.769"),
}
_MEANS = {"Table 2": _TABLE_2, "Table 3": _TABLE_3}
# Losses and perplexities, of training and of validation.
_TABLE_4 = {
    "QKV": ("1.73", "5.64", "1.63", "5.11"),
    "Q-K=V": ("1.72", "5.58", "1.66", "5.27"),
    "Q=K-V": ("1.73", "5.66", "1.68", "5.36"),
    "Q=K=V": ("1.98", "7.23", "1.86", "6.41"),
    "GQA-4": ("1.72", "5.58", "1.64", "5.15"),
    "MQA": ("1.72", "5.59", "1.65", "5.19"),
    "Q-GQA-4": ("1.73", "5.64", "1.67", "5.32"),
    "Q-MQA": ("1.73", "5.66", "1.68", "5.36"),
}
_WORSE = {  # % above QKV's 5.11 at 300M
    "Q-K=V": "3.1",
    "Q=K-V": "4.9",
    "Q=K=V": "25.4",
    "GQA-4": "0.7",
    "MQA": "1.5",
    "Q-GQA-4": "3.9",
    "Q-MQA": "4.8",
}
# At 1.2B: perplexity, and what it is above QKV's, and in %.
_QKV_LARGE = "5.004"
_TABLE_10 = {
    "Q-K=V": ("5.128", "0.124", "2.48"),
    "GQA-8": ("5.030", "0.026", "0.52"),
    "MQA": ("5.057", "0.053", "1.06"),
    "Q-GQA-8": ("5.158", "0.154", "3.08"),
    "Q-MQA": ("5.212", "0.208", "4.16"),
}


def means() -> dict[str, bool]:
    """Whether the last columns of Tables 2 and 3 are means of the others."""
    found = {}
    for table, rows in _MEANS.items():
        for name, (figures, last) in rows.items():
            found[f"{table}, {name}"] = rounded.span(last).meets(rounded.mean(figures))
    return found


def means_said() -> str:
    said = []
    for name in (name for name, fits in means().items() if not fits):
        table, _, variant = name.partition(", ")
        figures, last = _MEANS[table][variant]
        said.append(f"{name}: {statistics.mean(map(float, figures)):.3f}, printed {last}")
    return "; ".join(said)


def exponentials() -> dict[str, bool]:
    """Whether perplexities of Table 4 are exponentials of the losses beside them."""
    found = {}
    for name, (*training, loss, perplexity) in _TABLE_4.items():
        for which, (nats, of) in (("training", training), ("validation", (loss, perplexity))):
            least, most = rounded.span(nats)
            can_be = rounded.Span(math.exp(least), math.exp(most))
            found[f"{name}, {which}"] = rounded.span(of).meets(can_be)
    return found


def worse() -> dict[str, bool]:
    """Whether what is stated of perplexities is what those that are printed give."""
    found = {
        f"{name} at 300M, %": rounded.percent_more(_TABLE_4[name][3], _TABLE_4["QKV"][3]).meets(
            rounded.span(percent)
        )
        for name, percent in _WORSE.items()
    }
    for name, (perplexity, more, percent) in _TABLE_10.items():
        above = rounded.less(perplexity, _QKV_LARGE)
        found[f"{name} at 1.2B"] = above.meets(rounded.span(more))
        in_percent = rounded.percent_more(perplexity, _QKV_LARGE)
        found[f"{name} at 1.2B, %"] = in_percent.meets(rounded.span(percent))
    return found


def orders() -> tuple[list[str], list[str]]:
    """The six variants that both sizes have, from the least perplexity up."""
    small = {name.replace("-4", ""): float(row[3]) for name, row in _TABLE_4.items()}
    large = {name.replace("-8", ""): float(row[0]) for name, row in _TABLE_10.items()}
    large["QKV"] = float(_QKV_LARGE)
    common = [name for name in small if name in large]
    return sorted(common, key=small.__getitem__), sorted(common, key=large.__getitem__)


def least_loss() -> dict[str, bool]:
    """Whether each variant that groups heads, at either size, is less than 5 % worse."""
    grouped = {name: _WORSE[name] for name in ("GQA-4", "MQA", "Q-GQA-4", "Q-MQA")}
    found = {f"{name} at 300M": float(percent) < 5 for name, percent in grouped.items()}
    return found | {f"{name} at 1.2B": float(row[2]) < 5 for name, row in _TABLE_10.items()}


CLAIMS = (
    Claim(
        "Table 2; Table 3",
        "their last columns are means of the others, TinyImageNet's left out",
        ".780 to .870; .767 to .772",
        OfItself(Cases(means, means_said)),
    ),
    Claim(
        "Table 4",
        "perplexities are exponentials of losses",
        "5.11 of 1.63; 15 more",
        OfItself(Cases(exponentials, lambda: "as both are rounded")),
    ),
    Claim(
        "Table 4; Table 10; Table 11; section 3.3.5",
        "what each variant's perplexity is above QKV's, in % at both sizes",
        "3.1, 4.9, 25.4, 0.7, 1.5, 3.9, 4.8; 2.48, 0.52, 1.06, 3.08, 4.16",
        OfItself(Cases(worse, lambda: "of the perplexities beside them, as rounded")),
    ),
    Claim(
        "Table 4; Table 11; Figure 7; section 4",
        "how far Q=K-V is above QKV",
        "+4.9 % in the tables, 4.8 % in figure and text",
        rounded.twice(_WORSE["Q=K-V"], "4.8"),
    ),
    Claim(
        "section 3.3.5; section 1.2",
        "six variants have one order of perplexities at 300M and 1.2B",
        "one order",
        OfItself(
            Cases(
                lambda: {"order": orders()[0] == orders()[1]},
                lambda: f"at 1.2B {', '.join(orders()[1])}; one run of each",
            )
        ),
    ),
    Claim(
        "Figure 8; Figure 9; Figure 11; section 3.3.5",
        "with grouped heads, and keys as values too, less than 5 % of perplexity is lost",
        "<5 %",
        OfItself(
            Cases(
                least_loss,
                lambda: (
                    f"at most {max(float(row[2]) for row in _TABLE_10.values())} % at 1.2B, "
                    f"{_WORSE['Q-MQA']} % at 300M"
                ),
            )
        ),
    ),
    Claim(
        "Table 10; abstract",
        "models of 1.2B were trained on 10B tokens",
        "10B; section 3.3: 8.85B",
        rounded.twice("10", "8.85"),
    ),
    Claim(
        "section 1.2; section 4",
        "12 tasks",
        "12",
        OfItself(Computed("12", lambda: 5 + 6 + 1, "5 synthetic, 6 of vision, language modelling")),
    ),
    Claim(
        "section 2.4",
        "with m = 100 and d = 1,000, (Q=K-V)+ takes less than QKV below 10,000 tokens",
        "10,000",
        OfItself(
            Computed("10,000", lambda: 1000**2 / 100, "by Table 1: n²m is less than nd² to there")
        ),
    ),
    Claim(
        "section 2.5",
        "half the cache in 8 bits is a quarter: 75 % saved",
        "75 %",
        OfItself(Computed("75", lambda: 100 * (1 - 0.5 * 0.5), "scales of groups are not counted")),
    ),
)
