"""A comparison in a few lines: who is better, by how much, with how large a cache."""

from collections.abc import Mapping, Sequence

from kvjax.foundation.intervals import Estimate

_NAMED = 4  # maximum of curves that a line names


def lines(rows: Sequence[Mapping], reference: str) -> list[str]:
    """Returns sentences on the rows of `report.rows`; the first is the verdict.

    Args:
      reference: name of the row that others are compared with.
    """
    ended = [row for row in rows if row["bpb"] is not None]
    if not ended:
        return ["No run has finished: there is no verdict yet."]
    against = next(row for row in rows if row["name"] == reference)
    judged = {row["name"]: row for row in ended if row["against"] is not None}
    best = min(ended, key=lambda row: row["bpb"])
    if not judged:
        cache = f"{best['cache_bytes']:,} cache bytes per token in bfloat16"
        text = f"{best['name']}: {_bpb(best)} bits per byte with {cache}"
        if len(ended) > 1:
            text += f", the least of {len(ended)}; none has as many tokens as {reference}"
        return [f"{text}."]
    better, worse, equal, single = [], [], [], []
    for row in judged.values():
        found = Estimate(row["against"], row["against_half_interval"])
        kinds = {None: single} if found.half is None else {-1: better, 1: worse, 0: equal}
        kinds[None if found.half is None else found.sign].append(
            f"{row['name']} ({found.shown('+.4f')}, "
            f"{100 * row['cache_bytes'] / against['cache_bytes']:.0f} % of the cache)"
        )
    cache = f"{against['cache_bytes']:,} cache bytes in bfloat16"
    of = f"{reference} ({_bpb(against)} bits per byte, {cache})"
    parts = [
        f"{text} {_some(names)}"
        for text, names in (
            ("better:", better),
            ("worse:", worse),
            ("not distinguishable at 95 %:", equal),
            ("one common seed, so no interval:", single),
        )
        if names
    ]
    said = [f"Against {of}: {'; '.join(parts)}."]
    if len(judged) - len(single) > 1:
        count = len(judged) - len(single)
        said.append(f"Each of the {count} intervals is at 95 %, not corrected for their number.")
    return said


def _some(names: Sequence[str]) -> str:
    left = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {left} more" if left > 0 else "")


def _bpb(row: Mapping) -> str:
    return Estimate(row["bpb"], row["bpb_half_interval"]).shown(".4f")
