"""Writes a comparison's verdict: which runs are better, by how much, with how large a cache."""

from collections.abc import Mapping, Sequence

from kvjax.foundation.intervals import Estimate

_MAX_NAMES = 4  # curves that a sentence names per class


def lines(rows: Sequence[Mapping], reference: str) -> list[str]:
    """Returns sentences on the rows of `report.rows`; the first one is the verdict.

    Args:
      reference: name of the row that others are compared with.
    """
    ended = [row for row in rows if row["bpb"] is not None]
    if not ended:
        return ["No run has finished: there is no verdict yet."]
    against = next(row for row in rows if row["name"] == reference)
    judged = {row["name"]: row for row in ended if row["against"] is not None}
    best = min(ended, key=lambda row: row["bpb"])
    unpaired = [
        row["name"]
        for row in ended
        if row["name"] not in {reference, *judged} and row["tokens"] == against["tokens"]
    ]
    if not judged:
        cache = f"{best['cache_bytes']:,} cache bytes per token in bfloat16"
        text = f"{best['name']}: {_bpb(best)} bits per byte with {cache}"
        if len(ended) > 1:
            why = (
                "as many tokens and a finished seed in common with"
                if unpaired
                else "as many tokens as"
            )
            text += f", the least of {len(ended)}; none has {why} {reference}"
        return [f"{text}."]
    better, worse, equal, single = [], [], [], []
    for row in judged.values():
        difference = Estimate(row["against"], row["against_half_interval"])
        names = single
        if difference.half is not None:
            names = {-1: better, 1: worse, 0: equal}[difference.sign]
        names.append(
            f"{row['name']} ({difference.shown('+.4f')}, "
            f"{100 * row['cache_bytes'] / against['cache_bytes']:.0f} % of the cache)"
        )
    cache = f"{against['cache_bytes']:,} cache bytes in bfloat16"
    classes = (
        ("better:", better),
        ("worse:", worse),
        ("not distinguishable at 95 %:", equal),
        ("one common seed, so no interval:", single),
        ("no common seed, so not compared:", unpaired),
    )
    text = "; ".join(f"{label} {_listed(names)}" for label, names in classes if names)
    sentences = [f"Against {reference} ({_bpb(against)} bits per byte, {cache}): {text}."]
    count = len(judged) - len(single)
    if count > 1:
        sentences.append(
            f"Each of the {count} intervals is at 95 %, not corrected for their number."
        )
    return sentences


def _listed(names: Sequence[str]) -> str:
    left = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {left} more" if left > 0 else "")


def _bpb(row: Mapping) -> str:
    return Estimate(row["bpb"], row["bpb_half_interval"]).shown(".4f")
