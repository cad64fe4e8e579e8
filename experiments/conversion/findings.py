"""Sentences on the claims of thin keys and LRKV about conversion, computed from results."""

from collections.abc import Iterator
import math
import statistics

from experiments.conversion.outcomes import (
    Outcomes,
    Tuned,
    TuningSetting,
    percent,
    relative,
    variant_label,
)


def findings(outcomes: Outcomes) -> list[str]:
    """Returns one or two sentences for each claim with results."""
    found = [*_keys_and_queries(outcomes), *_half_rank(outcomes), *_objectives(outcomes)]
    for setting in outcomes.settings()[:1]:
        found += [*_recovery(outcomes, setting), *_by_bytes(outcomes, setting)]
    return [f"{outcomes.title}: {text}" for text in found]


def losses(outcomes: Outcomes, curve: str) -> dict[int, float]:
    """Returns the relative change of perplexity by rank; {} without the curve."""
    found, base = outcomes.curve(curve), outcomes.original["perplexity"]
    points = found["points"] if found else ()
    return {point["rank"]: relative(point["perplexity"], base) for point in points}


def _keys_and_queries(outcomes: Outcomes) -> Iterator[str]:
    """Tests thin keys' section 3.5: keys are more compressible than queries at every rank."""
    for mode in ("joint", "per_head"):
        key, query = (losses(outcomes, f"{part}_{mode}_weights") for part in ("key", "query"))
        ranks = [rank for rank in key if rank in query]
        if not ranks:
            continue
        less = [rank for rank in ranks if key[rank] < query[rank]]
        answer = {len(ranks): "yes", 0: "no"}.get(len(less), "partly")
        quarter = min(ranks, key=lambda rank: abs(rank - outcomes.whole_rank / 4))
        yield (
            f"are keys more compressible than queries, as thin keys says (GPT-2, rank d/4: +26 % "
            f"against +181 %)? {answer}: {mode.replace('_', ' ')}, by SVD of the weights, keys "
            f"lose less at {len(less)} of {len(ranks)} ranks; at {quarter} of "
            f"{outcomes.whole_rank} {percent(key[quarter])} against {percent(query[quarter])}"
        )


def _half_rank(outcomes: Outcomes) -> Iterator[str]:
    """Tests thin keys' section 3.5: rank d/2 costs 2 %."""
    half = outcomes.whole_rank // 2
    parts = []
    for mode in ("joint", "per_head"):
        for objective in ("weights", "outputs"):
            loss = losses(outcomes, f"key_{mode}_{objective}").get(half)
            if loss is not None:
                parts.append(f"{mode.replace('_', ' ')}, {objective}: {percent(loss)}")
    if parts:
        yield f"is half the rank about free (GPT-2 +2.0 %, Mistral +1.7 %)? {'; '.join(parts)}"


def _objectives(outcomes: Outcomes) -> Iterator[str]:
    """States the share of the loss that calibration avoids; no paper reports it."""
    for name, curve in (("thin keys", "key_per_head"), ("LRKV", "lrkv")):
        plain, calibrated = (losses(outcomes, f"{curve}_{o}") for o in ("weights", "outputs"))
        ranks = [r for r in plain if r in calibrated and math.log(1 + plain[r]) > 0.001]
        if not ranks:
            continue
        ratio = statistics.median(
            math.log(1 + calibrated[r]) / math.log(1 + plain[r]) for r in ranks
        )
        yield (
            f"holding outputs instead of weights leaves {ratio:.0%} of the loss in log-perplexity "
            f"by {name} (median of {len(ranks)} ranks)"
        )


def _recovery(outcomes: Outcomes, setting: TuningSetting) -> Iterator[str]:
    """Tests thin keys' sections 3.5 and 3.7: tuning recovers most of the loss."""
    parts = []
    for variant in setting.variants:
        recovered = recovered_share(outcomes, variant)
        if recovered is not None:
            parts.append(f"{variant_label(variant.name)} {recovered:.0%}")
    if parts:
        yield (
            "does tuning give back most of the loss (GPT-2, rank d/4: +27.6 % to +1.8 % against "
            f"the control)? Of the loss in log-perplexity ({setting.label}): {', '.join(parts)}"
        )


def recovered_share(outcomes: Outcomes, variant: Tuned) -> float | None:
    """Returns 1 - loss against the tuned control / loss against the original, in log-perplexity.

    None if conversion lost less than 2 %.
    """
    against = variant.against_control()
    before = math.log(variant.before / outcomes.original["perplexity"])
    if against is None or before < 0.02:
        return None
    return 1 - math.log(1 + against[0]) / before


def _by_bytes(outcomes: Outcomes, setting: TuningSetting) -> Iterator[str]:
    """Compares LRKV with thin keys at equal cache bytes, after tuning."""
    for variant in setting.variants:
        if not variant.name.startswith("lrkv_"):
            continue
        for other in setting.variants:
            ours, theirs = variant.against_control(), other.against_control()
            thin = other.name.startswith("thin") and _as_many(other, variant)
            if not thin or ours is None or theirs is None:
                continue
            seeds = [seed for seed in variant.after if seed in other.after]
            ahead = sum(variant.after[seed] < other.after[seed] for seed in seeds)
            one = f"{variant_label(variant.name)} is {percent(ours[0])}"
            two = f"{variant_label(other.name)} {percent(theirs[0])}"
            yield (
                f"in {variant.share:.0%} of the cache {one} and {two} against the control after "
                f"tuning; LRKV is ahead in {ahead} of {len(seeds)} seeds"
            )


def _as_many(one: Tuned, other: Tuned) -> bool:
    return abs(one.cached / other.cached - 1) < 0.04
