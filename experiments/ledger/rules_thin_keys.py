"""Rules for claims of thin keys: small tasks, converted models, shapes."""

import math
import statistics

from experiments.conversion import records
from experiments.ledger import judge
from experiments.studies.thin_keys_tasks import CHANNELS, EVERY, STARTS, TASKS, cell
from kvjax.cache import quantized
from kvjax.cache.field import Field
from kvjax.costs import formulas
from kvjax.foundation.intervals import Estimate

_CALLED = {"fan_in": "weights by fan-in", "equal": "matrices that start alike"}

# -- small tasks -----------------------------------------------------------------------------------


@judge.rule
def both_starts(of: dict) -> judge.Judgement:
    """Judges a claim on small tasks from each initialisation that was trained.

    The paper does not name its initialisation. A claim that holds from only one holds in part.

    Args:
      of: a rule with the option `start`.
    """
    judgements = {start: judge.judge(of | {"start": start}) for start in STARTS}
    judgements = {start: x for start, x in judgements.items() if x.verdict != judge.MISSING}
    if not judgements:
        raise judge.NoResultError("thin_keys_tasks")
    if len(judgements) == 1:
        return next(iter(judgements.values()))
    ours = "; ".join(f"{_CALLED[start]}: {x.ours}" for start, x in judgements.items())
    return judge.Judgement(judge.combined([x.verdict for x in judgements.values()]), ours)


def _rows(task: str, start: str = "fan_in") -> dict[int, dict]:
    """Returns rows by channels; raises a judge.NoResultError unless each has three seeds."""
    rows = [r for r in judge.read("thin_keys_tasks")["rows"] if r.get("start", "fan_in") == start]
    by_channels = {r["channels"]: r for r in rows if r["task"] == task}
    if not by_channels or any(row["seeds"] < judge.SEEDS for row in by_channels.values()):
        raise judge.NoResultError(task)
    return by_channels


@judge.rule
def reaches(task: str, least: int, start: str = "fan_in") -> judge.Judgement:
    """Checks that the best accuracy prints as 100.0 % from `least` channels on.

    The paper's tables print the best accuracy during training. With fewer channels no seed may
    converge.
    """
    rows, runs = _rows(task, start), judge.read("thin_keys_tasks")["runs"]
    best = {}
    for n in rows:
        of_seeds = runs[cell(task, n, start).name].values()
        best[n] = 100 * statistics.mean(max(run["curve"].values()) for run in of_seeds)
    holding = {
        f"d_select {n}": f"{best[n]:.1f}" == "100.0" if n >= least else not row["converged_runs"]
        for n, row in rows.items()
    }
    ends = {n: Estimate(r["right"], r["right_half_interval"]).times(100) for n, r in rows.items()}
    shown = "; ".join(f"{n}: {x.shown('.1f')} %, best {best[n]:.1f}" for n, x in ends.items())
    return judge.cases(
        holding,
        f"at the end, and the best on the way, as the paper's tables have it: {shown} "
        f"(means over {min(row['seeds'] for row in rows.values())} seeds)",
    )


@judge.source
def batches_to_converge(task: str, few: int, many: int) -> judge.Difference:
    """Returns the batches until convergence with few channels minus those with many."""

    def by_seed(channels: int) -> dict[str, float]:
        runs = judge.read("thin_keys_tasks")["runs"].get(f"{task}/d{channels}", {})
        return {seed: x["converged"] for seed, x in runs.items() if x["converged"] is not None}

    return judge.paired(by_seed(few), by_seed(many), task)


@judge.rule
def converges(task: str) -> judge.Judgement:
    """Checks when a task converges, by channels: within one evaluation of the paper's batch.

    If the paper has no number, no seed may converge; otherwise all must.
    """
    rows = _rows(task)
    verdicts = [converged(row) for row in rows.values()]
    count = f"{verdicts.count(judge.REPRODUCED)} of {len(verdicts)} cases as there"
    if judge.INDISTINCT in verdicts:
        count += f", {verdicts.count(judge.INDISTINCT)} {judge.INDISTINCT}"
    shown = []
    for n, row in rows.items():
        if row["converged_half_interval"] is None:
            shown.append(f"{n}: {row['converged_runs']} of {row['seeds']} seeds")
        else:
            batches = Estimate(row["converged"], row["converged_half_interval"])
            shown.append(f"{n}: {batches.shown('.0f')}")
    return judge.Judgement(
        judge.combined(verdicts),
        f"{count}, margin {EVERY}; batches (epochs, to the paper) until "
        f"{100 * TASKS[task].converged:.0f} % are right, looked at every {EVERY}: "
        f"{'; '.join(shown)}",
    )


def converged(row: dict) -> str:
    published, half = row["published_converged"], row["converged_half_interval"]
    if published is None:
        return judge.CONTRADICTED if row["converged_runs"] else judge.REPRODUCED
    if row["converged_runs"] < row["seeds"] or half is None:
        return judge.CONTRADICTED
    return judge.margin_verdict(row["converged"] - published, half, EVERY)


@judge.rule
def enough_channels(start: str = "fan_in") -> judge.Judgement:
    """Checks that 2·log2 N channels suffice to converge, with N keys: 8 for 16 keys.

    Where no d_select converges with every seed, training was too short, and nothing is judged.
    """
    least, missing, unlearned = {}, [], []
    for keys in (8, 16, 32, 64):
        try:
            rows = _rows("retrieval" if keys == 16 else f"retrieval_{keys}_keys", start)
        except judge.NoResultError:
            missing.append(keys)
            continue
        suffice = [n for n, row in rows.items() if row["converged_runs"] == row["seeds"]]
        if suffice:
            least[keys] = min(suffice)
        else:
            unlearned.append(keys)
    predicted = {keys: min(n for n in CHANNELS if n >= 2 * math.log2(keys)) for keys in least}
    shown = ", ".join(f"{keys} keys: {n}, predicted {predicted[keys]}" for keys, n in least.items())
    reasons = {"are not measured": missing, "no d_select learns with every seed": unlearned}
    unjudged = "".join(f"; {', '.join(map(str, n))} keys {why}" for why, n in reasons.items() if n)
    return judge.cases(
        {f"{keys} keys": n <= predicted[keys] for keys, n in least.items()},
        f"least d_select that every seed converges with: {shown}{unjudged}",
    )


# -- converted models ------------------------------------------------------------------------------


@judge.rule
def keys_lose_less(objective: str) -> judge.Judgement:
    """Checks that truncating keys costs less than truncating queries, by model and % of rank."""
    pairs = {}
    for model, called in (("smollm2", "SmolLM2"), ("whisper", "Whisper")):
        keys, queries = (_cut(model, part, objective) for part in ("key", "query"))
        for share in sorted(keys.keys() & queries.keys()):
            pairs[f"{called}, {share} %"] = keys[share], queries[share]
    ours = ", ".join(f"{name}: {k:.0f} and {q:.0f}" for name, (k, q) in pairs.items())
    return judge.cases({name: keys < queries for name, (keys, queries) in pairs.items()}, ours)


def _cut(model: str, part: str, objective: str) -> dict[int, float]:
    """Returns perplexity by the remaining % of the rank of W_K or W_Q."""

    def points(part: str) -> list[dict]:
        curve = records.read(f"{model}/before/{part}_per_head_{objective}")
        if curve is None:
            raise judge.NoResultError(f"conversion of {model}")
        return curve["points"]

    # Keys are half of a cache: if a share s of it is left, 2 s - 1 of the keys are. Queries are cut
    # at the same ranks.
    percent = {p["rank"]: round(100 * (2 * p["share"] - 1)) for p in points("key")}
    return {percent[point["rank"]]: point["perplexity"] for point in points(part)}


# -- quantised caches ------------------------------------------------------------------------------


def _costs(mechanism: str, part: str) -> dict[str, float]:
    """Returns by seed what int4 for a part of the cache costs in bits per byte, stored basis."""
    runs = judge.read("cache_bits")["runs"].get(mechanism, {})
    costs = {}
    for seed, run in runs.items():
        bits = {name: figures["bits_per_byte"] for name, figures in run["caches"].items()}
        costs[seed] = bits[f"int4/stored/{part}"] - bits["//"]
    return costs


@judge.rule
def fragile_keys(thin: str) -> judge.Judgement:
    """Checks that int4 costs MHA more for keys than for values, and more than for thin keys.

    Args:
      thin: name of the mechanism with thin keys.
    """
    keys = _costs("mha", "key")
    gaps = {
        "MHA's keys less its values": judge.paired(keys, _costs("mha", "value"), "cache_bits"),
        "MHA's keys less thin ones": judge.paired(keys, _costs(thin, "key"), "cache_bits"),
    }
    seeds = min(count for _, count in gaps.values())
    shown = ", ".join(f"{name}: {gap.shown('+.4f')}" for name, (gap, _) in gaps.items())
    ours = f"cost of int4 in bits per byte; {shown} ({seeds} seeds, models of 1.3M parameters)"
    if seeds < judge.SEEDS:
        return judge.Judgement(judge.MISSING, ours)
    signs = [judge.sign_verdict(gap.sign, 1) for gap, _ in gaps.values()]
    return judge.Judgement(judge.combined(signs), ours)


@judge.rule
def int4_and_thin_keys(figure: str, channels: int, thin: int) -> judge.Judgement:
    """Checks how much smaller a head's key of `thin` channels in int4 is than one in 16 bits."""
    (packed, scale) = quantized.stored({"key": Field("H", (thin,))}, 4, "thin keys").values()
    bits_alone = packed.shape[0]
    with_scale = bits_alone + scale.shape[0] * scale.dtype.itemsize
    ratios = [2 * channels / size for size in (bits_alone, with_scale)]
    return judge.cases(
        {
            name: f"{ratio:.0f}" == figure
            for name, ratio in zip(("bits", "all"), ratios, strict=True)
        },
        f"{ratios[0]:g} from bits alone; {ratios[1]:g} with the float32 scale that kvjax stores "
        f"for each key of {thin} channels",
    )


# -- from shapes -----------------------------------------------------------------------------------


def _millions(channels: int) -> float:
    """Returns parameters of the LLaMA-like model, by channels of queries and keys."""
    model = judge.experiment_of(f"papers.py:llama_d{channels}_125m").model
    return formulas.parameters(model)["total"] / 1e6


@judge.rule
def llama_parameters(figures: dict[str, str]) -> judge.Judgement:
    """Checks millions of parameters, by channels."""
    ours = {channels: f"{_millions(int(channels)):.1f}" for channels in figures}
    shown = ", ".join(f"{channels}: {count}M" for channels, count in ours.items())
    return judge.cases({channels: ours[channels] == x for channels, x in figures.items()}, shown)


@judge.rule
def query_and_key_shares(low: float, high: float) -> judge.Judgement:
    """Checks the % of all parameters that are of queries and keys, in the paper's models."""
    mistral = 32 * 4096 * (32 + 8) * 128  # 32 layers of 4,096, 32 query and 8 KV heads of 128
    shares = {
        "GPT-2": 12 * 2 * (768 * 768 + 768) / 124.4e6,
        "Mistral-7B": mistral / 7.24e9,
        "its LLaMA-like model": 2 * 12 * 768 * 768 / (1e6 * _millions(768)),
    }
    return judge.within({name: 100 * share for name, share in shares.items()}, low, high, ".1f")
