"""Shares of mutants that tests detect, as Markdown."""

from collections.abc import Callable, Iterable

from kvjax.evaluate import scores
from tests.mutants import sample

_LEVELS = dict(folder=("folder",), quick=("folder", "quick"), slow=("folder", "quick", "slow"))


def table(content: dict) -> str:
    """Returns detected shares by folder and by operator, without equivalent mutants, with 95 %
    intervals."""
    mutants = content["mutants"]
    open_ = sum(not m.get("asked") and not m.get("equivalent") for m in mutants)
    folders = _rows(mutants, lambda m: sample.folder(m["file"]))
    operators = _rows(mutants, lambda m: m["operator"])
    head = (
        "| {} | drawn | equivalent | quick tests of its folder | all quick tests | and slow ones |"
    )
    line = "|---|---|---|---|---|---|"
    whole = _row("all", mutants)
    weighted = ", ".join(
        f"{name} {100 * share:.1f} %"
        for name in _LEVELS
        if (share := _weighted(content, name)) is not None
    )
    return "\n".join(
        [
            *(head.format("folder"), line, *folders, whole, ""),
            *(head.format("operator"), line, *operators, ""),
            f"By the places of each folder: {weighted}.",
            *([f"{open_} of {len(mutants)} are not tried yet."] if open_ else []),
        ]
    )


def _rows(mutants: list[dict], group: Callable[[dict], str]) -> list[str]:
    return [
        _row(name, [m for m in mutants if group(m) == name])
        for name in sorted({group(m) for m in mutants})
    ]


def _row(name: str, mutants: list[dict]) -> str:
    cells = [name, len(mutants), sum(bool(m.get("equivalent")) for m in mutants)]
    for level in _LEVELS:
        noticed, count = counts(mutants, level)
        cells.append(_share(noticed, count) if count else "")
    return f"| {' | '.join(map(str, cells))} |"


def _share(noticed: int, count: int) -> str:
    value, low, high = (100 * x for x in scores.accuracy(noticed, count))
    return f"{noticed} of {count}: {value:.0f} % ({low:.0f} to {high:.0f})"


def counts(mutants: Iterable[dict], level: str) -> tuple[int, int]:
    """Returns the mutants that a level's tests detect, and the mutants tried.

    Returns (0, 0) while some mutants have not been tried at this level: a share of the others would
    be too high.
    """
    tried = [m for m in mutants if not m.get("equivalent") and m.get("asked")]
    if any("noticed_by" not in m and level not in m["asked"] for m in tried):
        return 0, 0
    return sum(m.get("noticed_by") in _LEVELS[level] for m in tried), len(tried)


def _weighted(content: dict, level: str) -> float | None:
    """Estimates the detected share of all possible mutants, from the shares by folder."""
    shares = []
    for name, places in content["places"].items():
        in_folder = [m for m in content["mutants"] if sample.folder(m["file"]) == name]
        noticed, count = counts(in_folder, level)
        if count:
            shares.append((places, noticed / count))
        elif any(m.get("asked") for m in in_folder):
            return None
    total = sum(places for places, _ in shares)
    return sum(places * share for places, share in shares) / total if total else None
