"""Rules for claims of thin keys: small tasks, converted models, shapes."""

from collections.abc import Callable
import contextlib
import dataclasses
import math
import statistics

from experiments.conversion import kept
from experiments.ledger.out_of_reach import experiment_of
from experiments.ledger.results import NoResultError, paired, read
from experiments.ledger.rotated import rotated
from experiments.ledger.verdicts import (
    CONTRADICTED,
    REPRODUCED,
    SEEDS,
    UNTOLD,
    Cases,
    Found,
    Rule,
    of_all,
)
from experiments.studies.thin_keys_tasks import CHANNELS, EVERY, STARTS, TASKS, cell
from kvjax.costs import formulas
from kvjax.foundation.estimate import Estimate


@dataclasses.dataclass(frozen=True)
class BothStarts:
    """A claim on small tasks, judged from each start of the weights that was trained.

    The paper does not say how weights start; what holds from one start alone holds in part.

    Attributes:
      rule: by the start's name in `experiments.studies.thin_keys_tasks`.
    """

    rule: Callable[[str], Rule]

    def judge(self) -> Found:
        found = {}
        for start in STARTS:
            with contextlib.suppress(NoResultError):
                found[start] = self.rule(start).judge()
        if not found:
            raise NoResultError("thin_keys_tasks")
        if len(found) == 1:
            return next(iter(found.values()))
        said = "; ".join(f"{_CALLED[start]}: {one.ours}" for start, one in found.items())
        return Found(of_all([one.verdict for one in found.values()]), said)


_CALLED = {"fan_in": "weights by fan-in", "equal": "matrices that start alike"}


def _rows(task: str, start: str = "fan_in") -> dict[int, dict]:
    """By channels, of rows with at least three seeds."""
    rows = [r for r in read("thin_keys_tasks")["rows"] if r.get("start", "fan_in") == start]
    found = {r["channels"]: r for r in rows if r["task"] == task}
    if not found or any(row["seeds"] < SEEDS for row in found.values()):
        raise NoResultError(task)
    return found


def reaches(task: str, expected: Callable[[int], bool], start: str = "fan_in") -> Cases:
    """Which counts of channels have a best accuracy that prints as 100.0 %, or fail.

    The paper's tables print the best on the way. What fails converges with no seed.
    """

    def of() -> dict[str, bool]:
        best = _best(task, start)
        return {
            f"d_select {n}": f"{100 * best[n]:.1f}" == "100.0"
            if expected(n)
            else not row["converged_runs"]
            for n, row in _rows(task, start).items()
        }

    def figures() -> str:
        rows, best = _rows(task, start), _best(task, start)
        shown = {n: Estimate(r["right"], r["right_half_interval"]) for n, r in rows.items()}
        said = (
            f"{n}: {x.times(100).shown('.1f')} %, best {100 * best[n]:.1f}"
            for n, x in shown.items()
        )
        seeds = min(row["seeds"] for row in rows.values())
        return (
            f"at the end, and the best on the way, as the paper's tables have it: "
            f"{'; '.join(said)} (means over {seeds} seeds)"
        )

    return Cases(of, figures)


def _best(task: str, start: str) -> dict[int, float]:
    """By channels the best accuracy of each run, means over seeds."""
    runs = read("thin_keys_tasks")["runs"]
    of = lambda n: runs[cell(task, n, start).name].values()
    return {
        n: statistics.mean(max(run["curve"].values()) for run in of(n)) for n in _rows(task, start)
    }


def later(task: str, few: int, many: int) -> Callable[[], tuple[Estimate, int]]:
    """Batches until runs have converged, fewer channels less more, seed by seed."""

    def by_seed(channels: int) -> dict[str, float]:
        runs = read("thin_keys_tasks")["runs"].get(f"{task}/d{channels}", {})
        return {seed: x["converged"] for seed, x in runs.items() if x["converged"] is not None}

    def of() -> tuple[Estimate, int]:
        return paired(by_seed(few), by_seed(many), task)

    return of


@dataclasses.dataclass(frozen=True)
class Converges:
    """When a task converges, by channels: as in the paper to one look, its interval and all.

    Where the paper has no number no seed converges; elsewhere all do.
    """

    task: str

    def told(self) -> dict[int, str]:
        """By channels a verdict."""
        return {n: self._told(row) for n, row in _rows(self.task).items()}

    def _told(self, row: dict) -> str:
        published, half = row["published_converged"], row["converged_half_interval"]
        if published is None:
            return CONTRADICTED if row["converged_runs"] else REPRODUCED
        if row["converged_runs"] < row["seeds"] or half is None:
            return CONTRADICTED
        apart = abs(row["converged"] - published)
        if apart + half <= EVERY:
            return REPRODUCED
        return CONTRADICTED if apart - half > EVERY else UNTOLD

    def judge(self) -> Found:
        told = list(self.told().values())
        counts = f"{told.count(REPRODUCED)} of {len(told)} cases as there"
        if UNTOLD in told:
            counts += f", {told.count(UNTOLD)} not told apart"
        rows = "; ".join(f"{n}: {self._said(row)}" for n, row in _rows(self.task).items())
        of = f"{100 * TASKS[self.task].converged:.0f} % are right, looked at every {EVERY}"
        return Found(
            of_all(told),
            f"{counts}, margin {EVERY}; batches (epochs, to the paper) until {of}: {rows}",
        )

    def _said(self, row: dict) -> str:
        if row["converged_half_interval"] is None:
            return f"{row['converged_runs']} of {row['seeds']} seeds"
        return Estimate(row["converged"], row["converged_half_interval"]).shown(".0f")


_PARTS = ("key", "query")


def _cut(model: str, part: str, objective: str) -> dict[int, float]:
    """Perplexity of a converted model by what is left of the rank of W_K or W_Q, %."""

    def points(part: str) -> list[dict]:
        found = kept.read(f"{model}/before/{part}_per_head_{objective}")
        if found is None:
            raise NoResultError(f"conversion of {model}")
        return found["points"]

    # Keys are half of a cache, so its share tells theirs; a cut of queries has the same ranks.
    left = {p["rank"]: round(100 * (2 * p["share"] - 1)) for p in points("key")}
    return {left[point["rank"]]: point["perplexity"] for point in points(part)}


def keys_stand_it(objective: str) -> Cases:
    """Whether a cut of keys costs less than one of queries, by model and share of the rank."""

    def pairs() -> dict[str, tuple[float, float]]:
        found = {}
        for model, called in (("smollm2", "SmolLM2"), ("whisper", "Whisper")):
            keys, queries = (_cut(model, part, objective) for part in _PARTS)
            for share in sorted(keys.keys() & queries.keys()):
                found[f"{called}, {share} %"] = keys[share], queries[share]
        return found

    return Cases(
        lambda: {name: keys < queries for name, (keys, queries) in pairs().items()},
        lambda: ", ".join(f"{name}: {k:.0f} and {q:.0f}" for name, (k, q) in pairs().items()),
    )


def bound(start: str = "fan_in") -> Cases:
    """The least d_select that converges, with N keys: no more than 2·log2 N, 8 for 16 keys.

    Where no d_select converges with every seed, the batches are too few, and nothing is asked.
    """
    tasks = {8: "retrieval_8_keys", 16: "retrieval", 32: "retrieval_32_keys"}
    tasks |= {64: "retrieval_64_keys"}

    def enough(row: dict) -> bool:
        return row["converged_runs"] == row["seeds"]

    def measured() -> dict[int, dict[int, dict]]:
        """Rows by channels, by keys."""
        found = {}
        for keys, task in tasks.items():
            with contextlib.suppress(NoResultError):
                found[keys] = _rows(task, start)
        return found

    def unlearned() -> list[int]:
        """Numbers of keys that no d_select is enough for."""
        return [keys for keys, rows in measured().items() if not any(map(enough, rows.values()))]

    def least() -> dict[int, int]:
        return {
            keys: min(n for n, row in rows.items() if enough(row))
            for keys, rows in measured().items()
            if keys not in unlearned()
        }

    def predicted(keys: int) -> int:
        return min(n for n in CHANNELS if n >= 2 * math.log2(keys))

    def of() -> dict[str, bool]:
        return {f"{keys} keys": n <= predicted(keys) for keys, n in least().items()}

    def figures() -> str:
        said = (f"{keys} keys: {n}, predicted {predicted(keys)}" for keys, n in least().items())
        there = {
            "are not measured": [keys for keys in tasks if keys not in measured()],
            "no d_select learns with every seed": unlearned(),
        }
        more = "".join(f"; {', '.join(map(str, n))} keys {why}" for why, n in there.items() if n)
        return f"least d_select that every seed converges with: {', '.join(said)}{more}"

    return Cases(of, figures)


def parameters() -> dict[str, float]:
    """M of the LLaMA-like model, by channels of queries and keys."""
    return {
        str(n): formulas.parameters(experiment_of(f"papers/llama_d{n}_125m").model)["total"] / 1e6
        for n in (768, 192, 96, 48)
    }


def query_and_key_parameters() -> dict[int, int]:
    """Parameters by channels, in Table 3's model: six layers of width 256, with biases."""
    return {n: 2 * 6 * (256 + 1) * n for n in (8, 16, 32, 64, 128, 256)}


# Weights of queries and keys in Mistral-7B: 32 layers of 4,096, 32 query heads and 8 of keys, of
# 128 channels.
MISTRAL_QK = 32 * 4096 * (32 + 8) * 128


def attention_saved() -> float:
    """% of attention's weights that d_select = d/4 saves: of queries and keys, not V and O."""
    d = 768
    return 100 * (1 - (2 * d * d // 4 + 2 * d * d) / (4 * d * d))


def query_and_key_shares() -> dict[str, float]:
    """% of all parameters, of the models that the paper has."""
    llama = 2 * 12 * 768 * 768 / (1e6 * parameters()["768"])
    gpt2 = 12 * 2 * (768 * 768 + 768) / 124.4e6
    return {
        "GPT-2": 100 * gpt2,
        "Mistral-7B": 100 * MISTRAL_QK / 7.24e9,
        "its LLaMA-like model": 100 * llama,
    }


TABLE_3 = (24_672, 49_344, 98_688, 197_376, 394_752, 789_504)


def absorbed_gap(*, rope: bool) -> float:
    """How far (q B) A' is from q (A B)', in random numbers, with RoPE behind the projections."""
    import numpy as np

    rng = np.random.default_rng(0)
    q_H, a_R, b_RH = rng.normal(size=8), rng.normal(size=4), rng.normal(size=(4, 8))

    turned = rotated if rope else lambda x_H, position: x_H
    whole = turned(q_H, 9) @ turned(a_R @ b_RH, 4)
    return float(abs(turned(q_H @ b_RH.T, 9) @ turned(a_R, 4) - whole))
