"""Compares training runs: bits per byte against tokens, compute and time.

    python -m kvjax.compare runs/a runs/b                 # workdirs, or folders of them
    python -m kvjax.compare runs/studies --out=runs/compare/tiny
    python -m kvjax.compare runs/now runs/before --watch  # until all runs have ended
    python -m kvjax.compare runs/base --scores=runs/mid   # with scores after mid-training

Runs that differ only in their seed become one curve with a 95 % band. Prints a table and writes
compare.html (a self-contained file), compare.png and compare.json. Reads configs, metrics and
scores, but no weights. Workdirs may be in a bucket or come from another machine.
"""

import argparse
from collections.abc import Collection, Sequence
import json
import logging
import os
import time

from etils import epath

from kvjax.analysis.page import document, draw
from kvjax.analysis.page.section import Point
from kvjax.compare import (
    downstream,
    groups as groups_lib,
    report,
    runs as runs_lib,
    savings as savings_lib,
    verdict,
)
from kvjax.compare.groups import Group
from kvjax.compare.runs import SkippedRun
from kvjax.foundation import (
    command_line,
    json_text,
    lists,
    progress,
    provenance,
    target as target_lib,
)
from kvjax.foundation.configuration import between
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket
from kvjax.foundation.output import Output

HTML, PNG, JSON = "compare.html", "compare.png", "compare.json"
_LEAD = (
    "Training runs. Runs that differ only in their seed are one curve, with the 95 % interval of "
    "its mean."
)
_WATCH = 30  # seconds
_MAX_WATCH = 86_400


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("workdirs", nargs="*", metavar="WORKDIR", help="a run's folder, or a folder of runs")
    text = "seed: runs that differ only in their seed are one curve; none: a curve per run (seed)"
    add("--group", default="seed", help=text)
    add("--against", default="", help="name of the curve that others are compared with (the first)")
    text = "comma-separated workdirs; each gives its scores to the compared run it started from"
    add("--scores", default="", help=text)
    add("--out", default="runs/compare", help="the folder to write (runs/compare)")
    text = f"repeat every N seconds ({_WATCH}) until all runs have ended"
    add("--watch", type=int, nargs="?", const=_WATCH, default=0, metavar="SECONDS", help=text)
    options = parser.parse(arguments)
    lists.one("--group", options.group, groups_lib.WAYS)
    between("--watch", options.watch, 0, _MAX_WATCH)
    if not options.workdirs:
        raise UserError("no workdir is given: give runs, as runs/a runs/b, or a folder of runs")
    if len(set(options.workdirs)) < len(options.workdirs):
        twice = next(name for name in options.workdirs if options.workdirs.count(name) > 1)
        raise UserError(f"{twice} is given twice")
    return options


def main(arguments: list[str]) -> None:
    """Compares runs; see the module's docstring."""
    options = _options(arguments)
    target = target_lib.check(options.out, (HTML, PNG, JSON))
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it logs building its font cache
    out = Output(options)
    with target_lib.folder(target):
        result = _watched(options, target, out)
    out.result(result)


def _watched(options: argparse.Namespace, target: epath.Path, out: Output) -> dict:
    """Compares once, or with --watch until all runs have ended; returns the last result.

    The runs of the first comparison must be comparable. Later comparisons skip a folder that has
    disappeared, and a new run that is not comparable.
    """
    if not options.watch:
        return _once(options, target, out, *_read(options.workdirs, running=False))
    names, removed, first = list(options.workdirs), [], set()
    while True:
        missing = [name for name in names if first and not runs_lib.is_there(name)]
        removed += [SkippedRun(name, "does not exist any more") for name in missing]
        names = [name for name in names if name not in missing]
        runs, left_out = _read(names, running=True) if names else ([], [])
        if first:
            runs = sorted(runs, key=lambda run: run.name not in first)
            reasons = runs_lib.incomparable(runs)
            if options.group == "seed":
                reasons |= groups_lib.repeats([run for run in runs if run.name not in reasons])
            left_out += [SkippedRun(name, why) for name, why in reasons.items()]
            runs = [run for run in runs if run.name not in reasons]
        # Wait for runs that may be evaluated later, but not for runs that cannot be read.
        waiting = [skipped for skipped in left_out if skipped.may_come]
        all_ended = all(run.finished for run in runs) and not waiting
        if runs or all_ended:
            result = _once(options, target, out, runs, [*left_out, *removed], first)
            first = first or {run.name for run in runs}
        if all_ended:
            return result
        time.sleep(options.watch)


def _read(names: Sequence[str], *, running: bool):
    with progress.waiting("reading runs"):
        return runs_lib.read(runs_lib.workdirs(names), running=running)


def _once(options, target: epath.Path, out: Output, runs, left_out, first=frozenset()) -> dict:
    """Prints and writes one comparison.

    Args:
      first: names of the runs of the first comparison, if this is a later one.
    """
    if not runs:
        reasons = "; ".join(f"{skipped.name} {skipped.why}" for skipped in left_out)
        raise UserError(f"nothing to compare: {reasons}")
    runs_lib.check_comparable(runs)
    groups = groups_lib.groups(runs, options.group)
    names = [name for name in options.scores.split(",") if name]
    scores, unscored = downstream.read(runs, names)
    left_out = [*left_out, *groups_lib.without_curve(groups), *unscored]
    reference = _reference(options.against, groups, first)
    rows = report.rows(groups, reference)
    saved = savings_lib.savings(groups, reference)
    lacking = groups_lib.missing_seeds(groups) if options.group == "seed" else {}
    sentences = verdict.lines(rows, reference.name)
    for sentence in sentences:
        out.say(sentence)
    out.show(report.terminal(rows, reference))
    if saved:
        out.show(report.savings_table(saved))
    for skipped in left_out:
        out.say(f"- skipped: {skipped.name} {skipped.why}")
    for name, seeds in lacking.items():
        out.say(f"- {name} has no seed {', '.join(map(str, seeds))}, which others have")
    with progress.waiting("drawing"):
        sections = report.sections(groups, reference, rows, saved, left_out, lacking, scores)
        reload_seconds = options.watch if not all(run.finished for run in runs) else 0
        about = _about(runs)
        summary = [Point("", sentence) for sentence in sentences]
        html = document.page(
            "Runs compared", _LEAD, sections, about, summary=summary, reload_seconds=reload_seconds
        )
        result = dict(
            about=about,
            verdict=sentences,
            rows=rows,
            curves=next(section.data for section in sections if section.name == "curves"),
            savings=[vars(saving) for saving in saved],
            scores=scores,
            left_out=[vars(skipped) for skipped in left_out],
            lacking=lacking,
        )
        text = json.dumps(json_text.plain(result)) + "\n"
        picture = draw.picture(report.panels(groups, scores))
        target_lib.write(target, {HTML: html.encode(), PNG: picture, JSON: text.encode()})
    shown = target if in_bucket(target) else os.path.relpath(target)
    out.say(f"\nwritten: {shown}/{HTML}, {len(html) / 1e6:.2f} MB, {PNG} and {JSON}", wrap=False)
    names = {name.rpartition(".")[2]: str(target / name) for name in (HTML, PNG, JSON)}
    return json_text.plain(
        dict(verdict=sentences, rows=rows, left_out=result["left_out"], lacking=lacking) | names
    )


def _reference(name: str, groups: Sequence[Group], first: Collection[str]) -> Group:
    """Returns the group that others are compared with.

    Args:
      name: value of --against; "": the first group.
      first: names of the runs of the first comparison, if this is a later one. The group's name
        may have changed since, because runs of the same config name appeared. If the group has
        disappeared, the first group takes its place.
    """
    if not name:
        return groups[0]
    if first:
        for group in groups:
            is_old = any(run.name in first for run in group.runs.values())
            if is_old and name in (group.name, group.one.experiment.name):
                return group
        return groups[0]
    lists.one("--against", name, [group.name for group in groups])
    return next(group for group in groups if group.name == name)


def _about(runs: Sequence[runs_lib.ComparedRun]) -> dict:
    # Devices are not listed: a watched run may hold all of them.
    software = provenance.software("matplotlib")
    return {
        "Runs": ", ".join(run.name for run in runs),
        "Data set": runs[0].data["data set"],
        "Command": software["command"],
        "Date": software["date"],
        "Commit": software["commit"],
        "Versions": {"python": software["python"]} | software["packages"],
    }


if __name__ == "__main__":
    command_line.run(main)
