"""Claims of thin keys that its text makes of its own tables."""

from experiments.ledger import rounded
from experiments.ledger.verdicts import Cases, Claim, Computed, OfItself

# By table and row: a perplexity, what it is compared with, % above.
_PERPLEXITIES = {
    "Table 3, 8": ("126.48", "122.22", "3.5"),
    "Table 3, 16": ("125.49", "122.22", "2.7"),
    "Table 3, 32": ("123.78", "122.22", "1.3"),
    "Table 3, 64": ("122.24", "122.22", "0.0"),
    "Table 3, 128": ("120.76", "122.22", "-1.2"),
    "Table 4, 32": ("38.38", "35.67", "7.6"),
    "Table 4, 64": ("37.22", "35.67", "4.3"),
    "Table 4, 128": ("36.42", "35.67", "2.1"),
    "Table 5, keys, 128": ("57.37", "24.91", "130"),
    "Table 5, queries, 128": ("149.04", "24.91", "498"),
    "Table 5, both, 192": ("90.95", "24.91", "265"),
    "Table 5, keys, 192": ("31.32", "24.91", "26"),
    "Table 5, queries, 192": ("70.05", "24.91", "181"),
    "Table 5, both, 256": ("46.15", "24.91", "85"),
    "Table 5, keys, 256": ("27.49", "24.91", "10"),
    "Table 5, queries, 256": ("40.42", "24.91", "62"),
    "Table 5, keys, 384": ("25.40", "24.91", "2.0"),
    "Table 5, queries, 384": ("27.58", "24.91", "11"),
    "Table 5, both, 512": ("25.69", "24.91", "3.1"),
    "Table 5, keys, 512": ("25.23", "24.91", "1.3"),
    "Table 5, queries, 512": ("25.47", "24.91", "2.2"),
    "Table 7, 384, before": ("30.15", "29.51", "2.2"),
    "Table 7, 256, before": ("32.61", "29.51", "10.5"),
    "Table 7, 192, before": ("37.64", "29.51", "27.6"),
    "Table 7, 128, before": ("67.26", "29.51", "128"),
    "Table 7, 384": ("19.14", "19.07", "0.4"),
    "Table 7, 256": ("19.28", "19.07", "1.1"),
    "Table 7, 192": ("19.42", "19.07", "1.8"),
    "Table 7, 128": ("19.77", "19.07", "3.7"),
    "Table 8, 192": ("23.77", "22.80", "4.3"),
    "Table 8, 96": ("24.45", "22.80", "7.2"),
    "Table 8, 48": ("25.30", "22.80", "11.0"),
    "Table 9, 512, before": ("6.81", "6.69", "1.7"),
    "Table 9, 256, before": ("7.84", "6.69", "17.1"),
    "Table 9, 128, before": ("12.34", "6.69", "84.4"),
    "Table 9, 512": ("5.93", "5.91", "0.3"),
    "Table 9, 256": ("6.03", "5.91", "2.0"),
    "Table 9, 128": ("6.10", "5.91", "3.2"),
}
# By table: channels left of all, and % saved of keys, of keys' and queries' weights, of a cache.
_SAVED = {
    "Table 3, 8": (8 / 256, "97"),
    "Table 3, 16": (16 / 256, "94"),
    "Table 3, 32": (32 / 256, "87"),
    "Table 3, 64": (64 / 256, "75"),
    "Table 3, 128": (128 / 256, "50"),
    "Table 4, 32": (32 / 256, "87"),
    "Table 4, 64": (64 / 256, "75"),
    "Table 4, 128": (128 / 256, "50"),
    "Table 6, 384": ((1 + 384 / 768) / 2, "25"),
    "Table 6, 512": ((1 + 512 / 768) / 2, "17"),
    "Table 7, 384": (384 / 768, "50"),
    "Table 7, 256": (256 / 768, "67"),
    "Table 7, 192": (192 / 768, "75"),
    "Table 7, 128": (128 / 768, "83"),
    "Table 8, 192": (192 / 768, "75"),
    "Table 8, 96": (96 / 768, "87"),
    "Table 8, 48": (48 / 768, "94"),
    "Table 9, 512": (512 / 1024, "50"),
    "Table 9, 256": (256 / 1024, "75"),
    "Table 9, 128": (128 / 1024, "88"),
}


def percentages() -> dict[str, bool]:
    """Whether each % is what the two perplexities beside it give."""
    return {
        name: rounded.percent_more(one, other).meets(rounded.span(percent))
        for name, (one, other, percent) in _PERPLEXITIES.items()
    }


def shares() -> dict[str, bool]:
    """Whether each % saved is what the channels give; 87.5 rounds either way."""
    found = {}
    for name, (left, saved) in _SAVED.items():
        exact = 100 * (1 - left)
        found[name] = rounded.span(saved).meets(rounded.Span(exact, exact))
    return found


def alike() -> dict[str, bool]:
    """Whether costs of d/4 are one figure in Tables 4 and 8, those of d/8 within half a point."""
    printed = lambda name: _PERPLEXITIES[name][2]
    return {
        "d/4": printed("Table 4, 64") == printed("Table 8, 192"),
        "d/8": abs(float(printed("Table 4, 32")) - float(printed("Table 8, 96"))) <= 0.5,
    }


def _exact(name: str) -> float:
    one, other, _ = _PERPLEXITIES[name]
    return 100 * (float(one) / float(other) - 1)


CLAIMS = (
    Claim(
        "Table 3; Table 4; Table 5; Table 7; Table 8; Table 9",
        "percentages are of the perplexities beside them",
        f"{len(_PERPLEXITIES)} percentages",
        OfItself(Cases(percentages, lambda: "as perplexities are rounded")),
    ),
    Claim(
        "Table 3; Table 4; Table 6; Table 7; Table 8; Table 9",
        "what is saved, of weights, keys or a cache",
        f"{len(_SAVED)} percentages",
        OfItself(Cases(shares, lambda: "87.5 is printed as 87 and as 88")),
    ),
    Claim(
        "Table 8; section 3.6; abstract",
        "+4.3 % at d/4 is identical in both architectures, +7.6 and +7.2 % at d/8 close",
        "+4.3 and +4.3 %; +7.6 and +7.2 %",
        OfItself(
            Cases(
                alike,
                lambda: (
                    f"{_exact('Table 4, 64'):.2f} and {_exact('Table 8, 192'):.2f} % of the "
                    "perplexities; one run of each, of which no spread is known"
                ),
            )
        ),
    ),
    Claim(
        "section 3.7",
        "before tuning Mistral-7B loses more at rank 256 than GPT-2 at the equivalent rank",
        "+17.1 against +10.4 %, of a third of GPT-2's rank",
        OfItself(
            Cases(
                lambda: {
                    "as printed": 17.1 > 10.4,
                    "10.4 in Table 7": rounded.span("10.4").meets(
                        rounded.percent_more("32.61", "29.51")
                    ),
                    "a quarter of each": 17.1 > 27.6,
                },
                lambda: (
                    "Table 7 has +10.5 %; 256 is a quarter of Mistral's 1,024 channels of keys; "
                    "at a quarter GPT-2 loses 27.6 % (Table 7)"
                ),
            )
        ),
    ),
    Claim(
        "section 6; section 7",
        "GPT-2 and Mistral-7B are 58 times apart in size",
        "58x",
        OfItself(Computed("58", lambda: 7.2e9 / 124e6, "of 7.2B and 124M")),
    ),
    Claim(
        "section 4.2",
        "on WikiText-2 validation has 3.4 times the perplexity of training",
        "3.4x; 37 and 127",
        OfItself(Computed("3.4", lambda: 127 / 37, "of the two as section 3.3 prints them")),
    ),
)
