"""Claims of thin keys (arXiv 2603.04427)."""

import math

from experiments.ledger import thin_keys_rules as rules, thin_keys_stated
from experiments.ledger.out_of_reach import AtScale, Elsewhere, Undefined
from experiments.ledger.results import study
from experiments.ledger.verdicts import Cases, Claim, Computed, Differs, OfItself, Tabulated, within

TITLE = "Thin keys (arXiv 2603.04427)"
_TABLES = "python -m experiments.tables.paper_tables --save"
_TASKS = "python -m experiments.studies.thin_keys_tasks --save"
_STUDY = "thin_keys_key_dims"
_MODELS = f"python -m experiments.studies.language_models --study={_STUDY} --save"
_CONVERSION = "python -m experiments.studies.conversion"
_DEMO = "bits per byte, width 128, 1.0M tokens"
_GPT2 = (
    "GPT-2's weights and WikiText-2; the same cuts of SmolLM2 and Whisper stand in "
    "reports/conversion.md"
)
_WIKITEXT = "WikiText"


def _thinner(style: str, dim: int) -> Differs:
    return Differs(study(_STUDY, f"{style}_d{dim}"), 1, "+.4f", _DEMO)


def _words(dim: int) -> Elsewhere:
    """The rule for a claim about WikiText-103, with what other text shows here."""
    needs = f"{_WIKITEXT}-103, for the study word_models"
    return Elsewhere(needs, _thinner("vanilla", dim), "in models of the embedded books")


def _llama(channels: int, dim: int) -> AtScale:
    """At 125M; `dim` at demo size is as thin."""
    models = (f"papers/llama_d{channels}_125m", "papers/llama_d768_125m")
    return AtScale(models, 0.516e9, seen=_thinner("llama", dim), why="on WikiText-103")


CLAIMS = (
    Claim(
        "Table 1",
        "copy-back is solved with one channel per head, as drawn in the paper",
        "100 % at d_select 4 to 64",
        rules.BothStarts(lambda start: rules.reaches("copy_back_l2", lambda _: True, start)),
        _TASKS,
    ),
    Claim(
        "Table 1",
        "and with the rows and the depth of the authors' code",
        "100 % at d_select 4 to 64",
        rules.reaches("copy_back_periodic_l4", lambda _: True),
        _TASKS,
    ),
    Claim(
        "Table 1",
        "with one channel per head copying converges later than with two",
        "300 against 200",
        Differs(
            rules.later("copy_back_l2", 4, 8), 1, "+.0f", "batches, as drawn in the paper, width 64"
        ),
        _TASKS,
    ),
    Claim(
        "Table 1",
        "when copying converges, by channels",
        "300, 200, 200, 200, 200",
        rules.Converges("copy_back_l2"),
        _TASKS,
    ),
    Claim(
        "Table 1",
        "when it converges with the rows and the depth of the authors' code",
        "300, 200, 200, 200, 200",
        rules.Converges("copy_back_periodic_l4"),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "when retrieval converges, by channels",
        "never, 1900, 1900, 1400, 1000",
        rules.Converges("retrieval"),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "retrieval of 16 keys fails with one channel per head and succeeds from two",
        "65.2 %, then 100 %",
        rules.BothStarts(lambda start: rules.reaches("retrieval", lambda n: n >= 8, start)),
        _TASKS,
    ),
    Claim(
        "Table 10; section 3.2; section 4.1",
        "selecting among N keys takes a small multiple of log2 N channels, 2·log2 N at N = 16",
        "8 at N = 16, alone",
        rules.BothStarts(rules.bound),
        _TASKS,
    ),
    Claim(
        "Table 10; section 3.3; section 4.1",
        "language has about 256 patterns to select among, which take log2 256 = 8 channels a head",
        "~256; 8",
        Undefined(
            "the 256 are read back from the 8 channels that suffice, and counted nowhere; Table 10 "
            "holds log2 N against channels of all heads for retrieval, and of one for language"
        ),
        "",
    ),
    Claim(
        "section 3.4; section 4.2",
        "on WikiText-103 the small model underfits",
        "",
        Undefined(
            "section 3.4 has perplexities of training and validation about equal, section 4.2 "
            "training's far above; none is printed"
        ),
        "",
    ),
    Claim(
        "Table 3",
        "WikiText-2: d/4 costs nothing, d/2 gains, d/32 costs 3.5 %",
        "122.24, 120.76 and 126.48 against 122.22",
        Elsewhere(f"{_WIKITEXT}-2"),
        "python -m experiments.studies.word_models --set=wikitext2 --folder=FOLDER",
    ),
    Claim(
        "Table 3",
        "parameters of queries and keys",
        "24,672 to 789,504",
        Cases(
            lambda: {
                f"d_select {n}": ours == printed
                for (n, ours), printed in zip(
                    rules.query_and_key_parameters().items(), rules.TABLE_3, strict=True
                )
            },
            lambda: "from shapes, biases included",
        ),
        "pytest tests/experiments/studies/test_word_models.py",
    ),
    Claim(
        "Table 4",
        "WikiText-103: d/4 costs 4.3 % of perplexity",
        "37.22 against 35.67",
        _words(32),
        _MODELS,
    ),
    Claim("Table 4", "d/8 costs 7.6 %", "38.38", _words(16), _MODELS),
    Claim("Table 4", "d/2 costs 2.1 %", "36.42", _words(64), _MODELS),
    Claim(
        "Table 4",
        "one row's figures",
        "35.80 and 35.67",
        Undefined("35.80 stands in the test column of d_select 128, whose +2.1 % fits 36.42"),
        "",
    ),
    Claim(
        "Table 8",
        "a LLaMA-like model: d/4 costs 4.3 %",
        "23.77 against 22.80",
        _llama(192, 32),
        _MODELS,
    ),
    Claim("Table 8", "d/8 costs 7.2 %", "24.45", _llama(96, 16), _MODELS),
    Claim("Table 8", "d/16 costs 11.0 %", "25.30", _llama(48, 8), _MODELS),
    Claim(
        "Table 8; section 3.6; abstract",
        "thin keys cost as much in either architecture",
        "+4.3 and +4.3 % at d/4; +7.6 and +7.2 % at d/8",
        AtScale(
            [f"papers/llama_d{dim}_125m" for dim in (768, 192, 96)],
            0.516e9,
            why="on WikiText-103, beside three vanilla models of 10M",
        ),
        _MODELS,
    ),
    Claim(
        "Table 5",
        "keys stand a cut of W_K's rank better than queries that of W_Q",
        "+10 % and +62 % at a third of the rank; at half +2.0 % and +11 %",
        Elsewhere(
            _GPT2,
            {
                "perplexities by SVD of the weights": rules.keys_stand_it("weights"),
                "perplexities by what a text shows of inputs": rules.keys_stand_it("inputs"),
            },
            "in other models, with so much of a head's rank left,",
        ),
        _CONVERSION,
    ),
    Claim(
        "Table 5",
        "cutting both compounds",
        "+85 % at a third of the rank",
        Elsewhere(_GPT2),
        _CONVERSION,
    ),
    Claim(
        "Table 6",
        "a cut of keys alone saves cache without retraining",
        "25 % at +2.0 %",
        Elsewhere(_GPT2),
        _CONVERSION,
    ),
    Claim(
        "Table 7",
        "tuning queries and keys brings it back",
        "+1.8 % at a quarter of the rank",
        Elsewhere(_GPT2),
        _CONVERSION,
    ),
    Claim(
        "section 3.5",
        "tuned parameters of GPT-2",
        "QK ~21M",
        Computed(
            "21", lambda: 12 * 2 * (768 * 768 + 768) / 1e6, "Q and K have 14.2M; Q, K and V 21.3M"
        ),
        "",
    ),
    Claim(
        "Table 9",
        "Mistral-7B: a quarter of the keys costs 2.0 % after tuning",
        "+0.3, +2.0, +3.2 %",
        Elsewhere("Mistral-7B's weights"),
        "",
    ),
    Claim(
        "Table 11",
        "cache per user",
        "67.2 GB at 128K",
        Tabulated(("Thin keys Table 11: cache per user",)),
        _TABLES,
    ),
    Claim(
        "abstract; section 1; section 7",
        "60 % more users in the same memory",
        "60 %",
        Tabulated(("Thin keys Table 11: cache per user",), only=lambda name: "more users" in name),
        _TABLES,
    ),
    Claim(
        "section 6",
        "with INT4 keys the key cache shrinks 16 times",
        "16x",
        OfItself(
            Computed(
                "16",
                lambda: 2 / (0.25 * 0.5),
                "of bits alone; scales of groups are not counted",
            )
        ),
        "",
    ),
    Claim(
        "section 6",
        "keys are fragile to quantisation, thin ones less",
        "",
        Elsewhere("a quantised cache, which is not built"),
        "",
    ),
    Claim(
        "Equation 12",
        "one SVD of W_K gives keys of rank r that all heads' queries absorb",
        "",
        Undefined(
            "a softmax per head makes W_Q' N times wider: one shared key of r channels, or r/N "
            "for each head. kvjax has both, by name"
        ),
        "python -m kvjax.convert --method=thin_keys",
    ),
    Claim(
        "Equation 17; section 3.7",
        "scores are preserved exactly, and the method is applied to Mistral, which has RoPE",
        "",
        Cases(
            lambda: {
                "without RoPE": rules.absorbed_gap(rope=False) < 1e-9,
                "under RoPE": rules.absorbed_gap(rope=True) < 1e-9,
            },
            lambda: (
                "RoPE stands between W_Q and W_K: keys are rotated when they are read, or RoPE's "
                "own channels are thin"
            ),
        ),
        "pytest tests/attention/test_law.py",
    ),
    Claim(
        "section 2.4",
        "thin keys save 2.5 TB for 100 users at 128K",
        "2.5 TB",
        Computed(
            "2.5",
            lambda: 100 * 0.75 * 2 * 32 * 4096 * 128_000 / 1e12,
            "three quarters of keys, 32 layers of 4,096 in 16 bits",
        ),
        "",
    ),
    Claim(
        "Table 8; section 3.6",
        "the LLaMA-like model's parameters",
        "101.7M, 91.1M, 89.3M, 88.4M",
        Cases(
            lambda: {
                channels: f"{count:.1f}" == printed
                for (channels, count), printed in zip(
                    rules.parameters().items(), ("101.7", "91.1", "89.3", "88.4"), strict=True
                )
            },
            lambda: ", ".join(f"{n}: {count:.1f}M" for n, count in rules.parameters().items()),
        ),
        "python -m experiments.tables.parameter_table",
    ),
    Claim(
        "section 3.6",
        "it is 12.5 times as large as the vanilla model",
        "12.5x",
        OfItself(
            Cases(
                lambda: {"125M": 125 / 10 == 12.5, "101.7M": round(101.7 / 10, 1) == 12.5},
                lambda: "over 10M, of the 125M that it is called and the 101.7M of its setup",
            )
        ),
        "",
    ),
    Claim(
        "section 4.3",
        "a cache of 524 GB does not fit six GPUs of 80 GB; thin keys bring it to 4 or 5",
        "more than 6; 4-5",
        OfItself(
            Cases(
                lambda: {
                    "more than 6": math.ceil(524 / 80) > 6,
                    "5 with d/2": math.ceil(393 / 80) == 5,
                    "4 with d/4": math.ceil(328 / 80) == 4,
                },
                lambda: (
                    f"524 GB takes {math.ceil(524 / 80)}; 393 with d/2 and 328 with d/4 take "
                    f"{math.ceil(393 / 80)} and {math.ceil(328 / 80)}; by Table 11, "
                    "weights left out"
                ),
            )
        ),
        "",
    ),
    Claim(
        "abstract; section 3.5",
        "after tuning, 75 % of the key cache is saved at less than 2 %",
        "75 % at <2 %",
        OfItself(
            Cases(
                lambda: {"GPT-2": 1.8 < 2, "Mistral-7B": 2.0 < 2},
                lambda: "by Tables 7 and 9: +1.8 and +2.0 %",
            )
        ),
        "",
    ),
    Claim(
        "section 1",
        "with d/4 the parameters of attention shrink by up to 75 %",
        "75 %",
        Computed("75", rules.attention_saved, "queries and keys alone do; values and outputs stay"),
        "",
    ),
    Claim(
        "section 3.7",
        "queries and keys of Mistral-7B are 671M of 7.2B parameters, 9.3 %",
        "671M; 9.3 %",
        Cases(
            lambda: {
                "671M": round(rules.MISTRAL_QK / 1e6) == 671,
                "9.3 %": round(100 * rules.MISTRAL_QK / 7.2e9, 1) == 9.3,
            },
            lambda: f"{rules.MISTRAL_QK / 1e6:,.0f}M from shapes",
        ),
        "",
    ),
    Claim(
        "section 5",
        "queries and keys are 3 to 12 % of a model's parameters",
        "3-12 %",
        within(rules.query_and_key_shares, 3, 12, ".1f"),
        "python -m experiments.tables.parameter_table",
    ),
    *thin_keys_stated.CLAIMS,
)
