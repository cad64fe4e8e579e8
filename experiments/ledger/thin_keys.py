"""Claims of thin keys (arXiv 2603.04427)."""

from collections.abc import Callable
import math

from experiments.ledger import verdicts
from experiments.ledger.verdicts import Cases
from experiments.ledger.verdicts import Claim
from experiments.ledger.verdicts import Computed
from experiments.ledger.verdicts import Differs
from experiments.ledger.verdicts import Elsewhere
from experiments.ledger.verdicts import NoResultError
from experiments.ledger.verdicts import Tabulated
from experiments.ledger.verdicts import Undefined
from experiments.ledger.verdicts import study
from experiments.studies.thin_keys_tasks import CHANNELS

TITLE = "Thin keys (arXiv 2603.04427)"
_TABLES = "python -m experiments.tables.paper_tables --save"
_TASKS = "python -m experiments.studies.thin_keys_tasks --save"
_STUDY = "thin_keys_key_dims"
_MODELS = f"python -m experiments.studies.language_models --study={_STUDY} --save"
_CONVERSION = "python -m experiments.studies.conversion"
_DEMO = "bits per byte, width 128, 1.0M tokens"


def _rows(task: str) -> dict[int, dict]:
    """By channels, of rows with at least three seeds."""
    found = {
        r["channels"]: r for r in verdicts.read("thin_keys_tasks")["rows"] if r["task"] == task
    }
    if not found or any(row["seeds"] < verdicts.SEEDS for row in found.values()):
        raise NoResultError(task)
    return found


def _reaches(task: str, expected: Callable[[int], bool]) -> Cases:
    """Which counts of channels reach (or do not) what counts as converged, in every seed."""

    def of() -> dict[str, bool]:
        return {
            f"d_select {n}": (row["converged_runs"] == row["seeds"]) == expected(n)
            for n, row in _rows(task).items()
        }

    def figures() -> str:
        return ", ".join(f"{n}: {100 * row['right']:.1f} %" for n, row in _rows(task).items())

    return Cases(of, figures)


def _bound() -> Cases:
    """The least d_select that converges, with N keys: as 8 for the paper's 16 keys, 2·log2 N."""
    tasks = {8: "retrieval_8_keys", 16: "retrieval", 32: "retrieval_32_keys"}
    tasks |= {64: "retrieval_64_keys"}

    def least() -> dict[int, int | None]:
        enough = lambda row: row["converged_runs"] == row["seeds"]
        return {
            keys: min((n for n, row in _rows(task).items() if enough(row)), default=None)
            for keys, task in tasks.items()
        }

    def of() -> dict[str, bool]:
        predicted = lambda keys: min(n for n in CHANNELS if n >= 2 * math.log2(keys))
        return {f"{keys} keys": found == predicted(keys) for keys, found in least().items()}

    def figures() -> str:
        said = (f"{keys} keys: {n or 'none'}" for keys, n in least().items())
        return "least d_select that converges: " + ", ".join(said)

    return Cases(of, figures)


def _thinner(style: str, dim: int) -> Differs:
    return Differs(study(_STUDY, f"{style}_d{dim}"), 1, "+.4f", _DEMO)


_GPT2 = (
    "GPT-2's weights and WikiText-2; the same cuts of SmolLM2 and Whisper stand in "
    "experiments/README.md"
)
_WIKITEXT = "WikiText"

CLAIMS = (
    Claim(
        "Table 1",
        "copy-back is solved with one channel per head, as drawn in the paper",
        "100 % at d_select 4 to 64",
        _reaches("copy_back_l2", lambda _: True),
        _TASKS,
    ),
    Claim(
        "Table 1",
        "and with the rows and the depth of the authors' code",
        "100 % at d_select 4 to 64",
        _reaches("copy_back_periodic_l4", lambda _: True),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "retrieval of 16 keys fails with one channel per head and succeeds from two",
        "65.2 %, then 100 %",
        _reaches("retrieval", lambda n: n >= 8),
        _TASKS,
    ),
    Claim(
        "Table 10; section 4.1",
        "selecting among N keys takes about log2 N channels",
        "N = 16 alone",
        _bound(),
        _TASKS,
    ),
    Claim(
        "Table 3",
        "WikiText-2: quality does not suffer, or gains",
        "126.48 to 120.76",
        Elsewhere(_WIKITEXT),
        "",
    ),
    Claim(
        "Table 4",
        "WikiText-103: d/4 costs 4.3 % of perplexity",
        "37.22 against 35.67",
        _thinner("vanilla", 32),
        _MODELS,
    ),
    Claim("Table 4", "d/8 costs 7.6 %", "38.38", _thinner("vanilla", 16), _MODELS),
    Claim("Table 4", "d/2 costs 2.1 %", "36.42", _thinner("vanilla", 64), _MODELS),
    Claim(
        "Table 4",
        "one row's figures",
        "35.80 and 35.67",
        Undefined("two baselines stand there; the table does not say which is whose test"),
        "",
    ),
    Claim(
        "Table 8",
        "a LLaMA-like model: d/4 costs 4.3 %",
        "23.77 against 22.80",
        _thinner("llama", 32),
        _MODELS,
    ),
    Claim("Table 8", "d/8 costs 7.2 %", "24.45", _thinner("llama", 16), _MODELS),
    Claim("Table 8", "d/16 costs 11.0 %", "25.30", _thinner("llama", 8), _MODELS),
    Claim(
        "Table 5",
        "keys stand a cut of W_K's rank better than queries that of W_Q",
        "+10 % against +62 % at half the rank",
        Elsewhere(_GPT2),
        _CONVERSION,
    ),
    Claim(
        "Table 5", "cutting both compounds", "+85 % at half the rank", Elsewhere(_GPT2), _CONVERSION
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
        "Table 7",
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
        "section 4.3",
        "60 % more users in the same memory",
        "60 %",
        Tabulated(("Thin keys Table 11: cache per user",), only="more users"),
        _TABLES,
    ),
    Claim(
        "section 5",
        "with INT4 keys the key cache shrinks 16 times",
        "16x",
        Computed(
            "16",
            lambda: 2 / (0.25 * 0.5),
            "of bits alone; scales of groups are not counted",
        ),
        "",
    ),
    Claim(
        "section 5",
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
        "section 3.6",
        "absorption is exact for Mistral",
        "",
        Undefined(
            "RoPE stands between W_Q and W_K; keys are rotated when they are read, or RoPE's own "
            "channels are thin"
        ),
        "pytest tests/attention/test_law.py",
    ),
)
