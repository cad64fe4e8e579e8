"""Compiles paper-scale configs for their target chips; writes the table in reports/configs.md.

    python -m experiments.tables.scaling_table --compile            # minutes for each config
    python -m experiments.tables.scaling_table --compile --only='*_128m'
    python -m experiments.tables.scaling_table                      # writes the table, lab notes
    python -m experiments.tables.scaling_table --check              # status 1 if they differ

The docstring of a config, its lab note, names the chips to compile for (lab_notes.py). The page
also has a table for each file with variants (variants.py).

--compile runs `python -m kvjax.aot` for each config that has no result in results/aot.jsonl, or
whose result is of an earlier version of the config; one after another, each in its own process. It
can be interrupted and started again. Without flags, the command writes the table, and the line "At
least" of each lab note, from the results; configs without a result are marked.
"""

import argparse
import ast
from collections.abc import Iterable, Sequence
import dataclasses
import difflib
import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import time

from experiments.record import EXPERIMENTS
from experiments.tables import lab_notes, variants
from experiments.tables.lab_notes import LabNote, Target
from kvjax.aot import __main__ as aot
from kvjax.config import defaults as defaults_of
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress, record_lines
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.workdir import identity

RESULTS = EXPERIMENTS / "results" / "aot.jsonl"
PAGE = EXPERIMENTS / "reports" / "configs.md"
BEGIN = "<!-- written by `python -m experiments.tables.scaling_table` -->"
END = "<!-- to here -->"
# Keys that do not affect a training step: a result stays valid when they change.
_NO_EFFECT = {
    *("name", "data.source", "data.validation_source", "data.validation_fraction"),
    *("data.text_key", "data.tokenizer", "data.specials", "data.directory"),
    *("train.seed", "train.eval_rows", "train.num_steps"),
    *(f"train.{key}" for key in identity.NEUTRAL_KEYS),
}
_MISSING = "not compiled yet"
_STALE = "changed since it was compiled"
_COLUMNS = (
    *("config", "parameters", "cache bytes per token", "target", "mesh", "remat", "parts"),
    *("GB per chip", "of HBM", "GFLOP per token", "GB sent per step and chip", "MFU at most"),
    *("without masked keys", "bound by", "days at least", "exaFLOPs"),
)
_WORDS = ("config", "target", "mesh", "remat", "GB sent per step and chip", "bound by")


def _days(target: Target, result: dict) -> str:
    """Returns the lower bound in days for the config's current number of steps."""
    days = target.experiment.train.num_steps * result["bound"]["seconds"] / 86_400
    return f"{days:.2f}" if days >= 0.01 else f"{days:.4f}"


def _exaflops(target: Target) -> str:
    """Returns model FLOPs of the whole run, in 10^18."""
    e = target.experiment
    per_token = formulas.training_flops_per_token(e.model, e.data.sequence_length)
    exaflops = per_token * e.tokens_per_step * e.train.num_steps / 1e18
    return f"{exaflops:,.0f}" if exaflops >= 1 else f"{exaflops:.2f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A result of `kvjax.aot` for a config on a topology, or the reason why there is none."""

    result: dict | None
    why: str = ""


# -- results ---------------------------------------------------------------------------------------


def outcome(note: LabNote, target: Target) -> Outcome:
    """Returns the saved result if it belongs to the current config."""
    result = _saved(note, target)
    if result is None:
        return Outcome(result=None, why=_MISSING)
    if _seen(result.get("resolved", ())) != _seen(target.resolved):
        return Outcome(result=None, why=_STALE)
    return Outcome(result=result)


def _saved(note: LabNote, target: Target) -> dict | None:
    return record_lines.find(RESULTS, aot.result_name(note.name, target.topology))


def _seen(lines: Iterable[str]) -> dict[str, str]:
    """Returns the values of config keys on which a training step depends, by key.

    Leaves out keys with default values, so that a result stays valid when keys are added.
    """
    values = dict(line.split(" = ", 1) for line in lines)
    kind = ast.literal_eval(values.get("attention.kind", "'grouped'"))
    defaults = {key: repr(value) for key, value in defaults_of(kind).items()}
    return {k: v for k, v in values.items() if k not in _NO_EFFECT and defaults.get(k) != v}


def compile_missing(notes: Sequence[LabNote], only: str = "*") -> list[str]:
    """Compiles configs without a result and prints the seconds that each took.

    Args:
      only: pattern of names of configs or results.

    Returns:
      A line for each config that was not compiled or does not fit its target.

    Raises:
      UserError: the pattern matches nothing.
    """
    chosen = [
        (note, target)
        for note in notes
        for target in note.targets
        for result in [aot.result_name(note.name, target.topology)]
        if fnmatch.fnmatch(note.name, only) or fnmatch.fnmatch(result, only)
    ]
    if not chosen:
        raise UserError(f"--only={only}: matches no config, nor any result")
    waiting = [pair for pair in chosen if outcome(*pair).result is None]
    print(f"{len(waiting)} of {len(chosen)} to compile", flush=True)
    for i, (note, target) in enumerate(waiting):
        start = time.perf_counter()
        with progress.waiting(f"compiling {note.name} for {target.topology}"):
            failure = _compile(note, target)
        current = outcome(note, target)  # the config may have changed meanwhile
        report = failure or current.why or f"{current.result['memory']['part']:.1%} of HBM"
        seconds = time.perf_counter() - start
        place = f"{i + 1}/{len(waiting)} {note.name} on {target.topology}"
        print(f"{place}: {seconds:.0f} s, {report}", flush=True)
    return [
        f"{note.name} on {target.topology}: {why}"
        for note, target in chosen
        if (why := _complaint(note, target))
    ]


def _compile(note: LabNote, target: Target) -> str:
    """Compiles one config in a process of its own; returns the reason of a failure, or ""."""
    before = _saved(note, target)
    run = subprocess.run(
        _command(note, target),
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu"} | os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if _saved(note, target) == before:
        lines = run.stderr.strip().splitlines()
        return f"status {run.returncode}: {lines[-1] if lines else 'no output'}"
    return ""


def _command(note: LabNote, target: Target) -> list[str]:
    config = (f"--config={note.path.relative_to(ROOT)}", *target.overrides)
    topology, save = f"--topology={target.topology}", f"--save={RESULTS.relative_to(ROOT)}"
    return [sys.executable, "-m", "kvjax.aot", *config, topology, save]


def _complaint(note: LabNote, target: Target) -> str:
    current = outcome(note, target)
    if current.result is None:
        return current.why
    return "" if current.result["fits"] else _too_large(current.result)


def _too_large(result: dict) -> str:
    return f"does not fit, {result['memory']['part']:.1%} of HBM"


# -- the page and lab notes ------------------------------------------------------------------------


def row(note: LabNote, target: Target) -> list[str]:
    """Returns the cells of a config on a target; compiled figures are empty without a result."""
    e = target.experiment
    axes = {name: n for name, n in target.mesh.items() if n > 1}
    flops = formulas.training_flops_per_token(e.model, e.data.sequence_length)
    file, _ = command_line.split_variant(note.path)
    path = pathlib.Path(os.path.relpath(file, PAGE.parent)).as_posix()
    cells = dict.fromkeys(_COLUMNS, "") | {
        "config": f"[{note.name}]({path})",
        "parameters": f"{formulas.parameters(e.model)['total']:,}",
        "cache bytes per token": f"{note.cache_bytes:,}",
        "target": target.topology,
        "mesh": " x ".join(f"{name} {n}" for name, n in axes.items()),
        "remat": e.compute.remat,
        "parts": str(e.train.grad_accumulation),
        "GFLOP per token": f"{flops / 1e9:.3f}",
        "exaFLOPs": _exaflops(target),
    }
    current = outcome(note, target)
    if current.result is None:
        cells["GB per chip"] = current.why
    else:
        cells |= _compiled_cells(current.result)
        cells["days at least"] = _days(target, current.result)
        cells["without masked keys"] = f"{_causal_mfu(target, current.result):.1%}"
    return list(cells.values())


def _compiled_cells(result: dict) -> dict[str, str]:
    memory, bound = result["memory"], result["bound"]
    at_most = "≤ " if result["memory_is_upper_bound"] else ""
    sent = {}
    for c in result["collectives"]:
        sent[c["kind"]] = sent.get(c["kind"], 0) + c["wire_bytes"] / 1e9
    shown = (f"{kind} {gb:.2f}" for kind, gb in sent.items() if gb >= 0.005)
    share = f"{memory['part']:.1%}"
    return {
        "GB per chip": f"{at_most}{memory['total'] / 1e9:.1f}",
        "of HBM": at_most + share if result["fits"] else f"**{at_most}{share}: does not fit**",
        "GB sent per step and chip": ", ".join(shown),
        "MFU at most": f"{bound['mfu']:.1%}",
        "bound by": bound["by"],
    }


def _causal_mfu(target: Target, result: dict) -> float:
    e = target.experiment
    return result["bound"]["mfu"] * formulas.causal_share(e.model, e.data.sequence_length)


def table(notes: Sequence[LabNote]) -> str:
    """Returns the Markdown table, a line for each config and target."""
    lines = [_COLUMNS, ["---" if column in _WORDS else "---:" for column in _COLUMNS]]
    lines += [row(note, target) for note in notes for target in note.targets]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def time_line(target: Target, current: Outcome) -> str:
    """Returns the line "At least ..." of a lab note for its first target."""
    if current.result is None:
        return f"At least: not known, {current.why}."
    result = current.result
    mfu, resource = _causal_mfu(target, result), result["bound"]["by"]
    line = (
        f"At least {_days(target, result)} days for {_exaflops(target)} exaFLOPs: at most "
        f"{mfu:.1%} MFU without masked keys, bound by {resource}"
    )
    return f"{line}." if result["fits"] else f"{line}; {_too_large(result)}."


def written(notes: Sequence[LabNote]) -> dict[pathlib.Path, str]:
    """Returns the current text of the page and of every file with one config.

    Raises:
      UserError: a file lacks the line or the marks that are replaced.
    """
    tables = f"\n{table(notes)}\n{variants.markdown()}"
    texts = {PAGE: _replace(PAGE, f"(?s)({BEGIN}\n).*?(\n{END})", tables)}
    for note in notes:
        if not note.path.is_file():  # a variant: the page alone has its figures
            continue
        line = time_line(note.targets[0], outcome(note, note.targets[0]))
        texts[note.path] = _replace(note.path, r"(?m)^()At least.*()$", line)
    return texts


def _replace(path: pathlib.Path, pattern: str, text: str) -> str:
    """Returns a file's text with the part between a pattern's two groups replaced."""
    before = path.read_text()
    if len(re.findall(pattern, before)) != 1:
        raise UserError(f"{path}: must have {pattern!r} once; it is replaced")
    return re.sub(pattern, lambda match: match[1] + text + match[2], before)


def differences(texts: dict[pathlib.Path, str]) -> str:
    """Returns a diff of the files against their texts from `written`; "" if there is none."""
    changes = []
    for path, text in texts.items():
        name = str(path.relative_to(ROOT))
        lines = [t.splitlines(keepends=True) for t in (path.read_text(), text)]
        changes += difflib.unified_diff(*lines, f"{name} (is)", f"{name} (should be)", n=0)
    return "".join(changes)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--compile", action="store_true", help="compile configs without a current result")
    add("--only", help="with --compile: names that match this pattern (*)")
    add("--check", action="store_true", help="write nothing; print the differences")
    options = parser.parse(arguments)
    if options.check and options.compile:
        raise UserError("--check --compile: give one of them")
    if options.only is not None and not options.compile:
        raise UserError(f"--only={options.only}: needs --compile; add it, or leave out --only")
    return options


def main(arguments: list[str]) -> int:
    """Compiles, writes or checks; returns 1 for a difference, a failure or too little HBM."""
    options = _options(arguments)
    with progress.waiting("reading the configs"):
        notes = lab_notes.read_all()
    if options.compile:
        complaints = compile_missing(notes, "*" if options.only is None else options.only)
        print("\n".join(complaints or ["all compiled, and all fit"]))
        return 1 if complaints else 0
    with progress.waiting("making the table"):
        texts = written(notes)
    if options.check:
        changes = differences(texts)
        print(changes or "nothing differs", end="" if changes else "\n")
        return 1 if changes else 0
    for path, text in texts.items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
