"""Analyses attention in a trained model and writes one page of figures and tables.

    python -m kvjax.analysis --workdir=runs/lrkv_tiny
    python -m kvjax.analysis --workdir=runs/lrkv --beside=runs/mha
    python -m kvjax.analysis --model=~/models/SmolLM2-135M --reports=logits --lengths=64,256

A model is a workdir, a Hugging Face folder or a GGUF file. OUT/report.html is self-contained and
opens in any browser. OUT/report.json has every number. Both are written when all reports are done,
and replace earlier files.
"""

import argparse
from collections.abc import Iterator, Mapping
import json
import logging
import os
import re
import time
import types

from etils import epath

from kvjax.analysis import reports, texts, words
from kvjax.analysis.page import document
from kvjax.analysis.page.section import Point, Section
from kvjax.analysis.request import Request
from kvjax.convert import model as model_lib
from kvjax.convert.model import LazyModel
from kvjax.costs import formulas
from kvjax.foundation import (
    command_line,
    json_text,
    lists,
    progress,
    provenance,
    runtime,
    target as target_lib,
)
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket
from kvjax.foundation.output import Output
from kvjax.model.parameters import Path
from kvjax.workdir import trained

LENGTHS = (64, 256, 1024)
HTML, JSON = "report.html", "report.json"
_SHORTEST = 2  # fewest tokens of a window
_MOST_MAPS = 16  # most attention maps in one figure
_LEAD = (
    "The measurements of four papers on small KV caches, made with this model and shown beside the "
    "papers' numbers: LRKV (arXiv 2601.11471), projection sharing (2606.04032), thin keys "
    "(2603.04427) and logit spectra (2604.04384)."
)


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("--workdir", default="", help="workdir of a run; its latest checkpoint is read")
    add(
        "--model",
        default="",
        help="instead: folder of a published model, .gguf file, or hf://OWNER/NAME",
    )
    add("--beside", default="", help="another workdir or model to compare with")
    names = ", ".join(reports.NAMES)
    add("--reports", default="", help=f"some of {names} (all that apply to the model)")
    text = "texts, NAME=FILE,... (embedded: held-out parts of two books)"
    add("--texts", default=texts.EMBEDDED, help=text)
    add("--text_key", default="text", help="key of texts in JSON lines and Parquet (text)")
    text = f"tokens per window ({','.join(map(str, LENGTHS))}, up to the model's context)"
    add("--lengths", default="", help=text)
    text = "heads to show as attention maps, LAYER.HEAD,... (the most distinctive ones)"
    add("--heads", default="", help=text)
    add("--out", default="", help="folder to write (runs/analysis/NAME)")
    return parser


def main(arguments: list[str]) -> None:
    """Analyses a model; see the module's docstring."""
    options = _parser().parse(arguments)
    with command_line.naming_options(options):
        _run(options, Output(options))


def _run(options: argparse.Namespace, out: Output) -> None:
    names = _report_names(options.reports)
    if bool(options.workdir) == bool(options.model):
        problem = "both are given" if options.model else "neither is given"
        raise UserError(f"--workdir and --model: {problem}; give one of them, as runs/lrkv_tiny")
    lengths = _lengths(options.lengths)
    heads = _heads(options.heads)
    if heads and "behaviour" not in names:
        raise UserError(f"--heads={options.heads}: needs behaviour among the --reports")
    sources = texts.sources(options.texts, options.text_key)
    if options.out:
        target_lib.check(options.out, (HTML, JSON))
    runtime.start()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # hides notes on its caches
    if options.model:
        model = _open("--model", options.model)
    else:
        model = _open("--workdir", options.workdir)
    beside = _open("--beside", options.beside) if options.beside else None
    _check_heads(model, heads)
    lengths = lengths or _default_lengths(model)
    target = target_lib.check(
        options.out or f"runs/analysis/{_file_name(model.name)}", (HTML, JSON)
    )
    _check_length(model, lengths[-1])
    with progress.waiting("reading texts"):
        tokens = texts.tokens(sources, model, lengths[-1])
        request = Request(tokens, lengths, beside, _snapshots(options, model), heads)
    for description, checked in _models(model, request):
        _check_weights(description, checked)
    modules = _applicable_reports(names, model, request, requested=bool(options.reports))
    with target_lib.folder(target):
        sections, seconds = _sections(modules, model, request)
        about = _about(options, model, request, seconds)
        sizes = _write(target, model, sections, about)
    for name, value in seconds.items():  # after writing, so that a closed pipe loses no report
        out.say(f"{name}: {value:.1f} s")
    folder = target if in_bucket(target) else os.path.relpath(target)
    out.say(f"\nwritten: {folder}/{HTML}, {sizes[HTML] / 1e6:.2f} MB, and {JSON}", wrap=False)
    paths = {name.rpartition(".")[2]: str(target / name) for name in (HTML, JSON)}
    out.result(paths | dict(bytes=sizes, seconds=seconds))


# -- input -----------------------------------------------------------------------------------------


def _report_names(option: str) -> tuple[str, ...]:
    """Returns the names of reports in --reports, or of all, in the order of the page."""
    known = reports.NAMES
    chosen = lists.names("--reports", option, known) if option else known
    return tuple(name for name in known if name in chosen)


def _lengths(option: str) -> tuple[int, ...]:
    """Returns the distinct lengths of --lengths, ascending; () without the option."""
    if not option:
        return ()
    return tuple(sorted(set(lists.integers("--lengths", option, _SHORTEST))))


def _heads(option: str) -> tuple[tuple[int, int], ...]:
    """Returns the distinct (layer, head) pairs of --heads; () without the option."""
    heads = []
    for item in option.split(",") if option else ():
        match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", item)
        if match is None:
            raise UserError(
                f"--heads={option}: {item!r} is not a head: give LAYER.HEAD, such as 3.1 for head "
                "1 of layer 3, separated by commas"
            )
        heads.append((int(match[1]), int(match[2])))
    if len(heads) > _MOST_MAPS:
        raise UserError(f"--heads: {len(heads)} heads: must be at most {_MOST_MAPS}")
    return tuple(dict.fromkeys(heads))


def _check_heads(model: LazyModel, heads: tuple[tuple[int, int], ...]) -> None:
    """Raises a UserError for heads that the model does not have."""
    mechanisms = model.transformer.mechanisms
    for layer, head in heads:
        if layer >= len(mechanisms):
            allowed = f"layers of {model.name} are 0 to {len(mechanisms) - 1}"
        elif head >= mechanisms[layer].query_heads:
            allowed = f"heads of layer {layer} are 0 to {mechanisms[layer].query_heads - 1}"
        else:
            continue
        raise UserError(f"--heads: {layer}.{head} does not exist: {allowed}")


def _default_lengths(model: LazyModel) -> tuple[int, ...]:
    return tuple(n for n in LENGTHS if n <= model.context) or (model.context,)


def _check_length(model: LazyModel, longest: int) -> None:
    try:
        model.transformer.check_length(longest)
    except UserError as error:
        message = str(error).replace("config.data.sequence_length", "--lengths")
        raise UserError(f"{message} in {model.name}") from error


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "model"


def _open(option: str, source: str) -> LazyModel:
    """Opens the model of an option; errors name the option."""
    try:
        if option == "--workdir":
            return model_lib.TrainedModel(runtime.workdir(source))
        return model_lib.open(source)
    except UserError as error:
        message = str(error).replace("--source", option)
        if option not in message:
            message = f"{option}={source}: {message}"
        raise UserError(message) from error


def _applicable_reports(
    names: tuple[str, ...], model: LazyModel, request: Request, *, requested: bool
) -> dict[str, types.ModuleType]:
    """Returns the reports that apply to the model.

    Args:
      requested: True if the user named the reports. If one then does not apply, it is an error.
    """
    modules = {}
    for name in names:
        module = reports.module(name)
        try:
            module.check(model, request)
        except UserError as error:
            if requested:
                raise UserError(f"--reports={name}: {error}") from error
            command_line.say(f"without {name}: {error}")
            continue
        modules[name] = module
    if not modules:
        raise UserError(f"none of the reports {', '.join(names)} applies to {model.name}")
    return modules


def _snapshots(options: argparse.Namespace, model: LazyModel) -> list[tuple[int, LazyModel]]:
    """Returns (step, model) of each snapshot that a workdir's run kept."""
    if not isinstance(model, model_lib.TrainedModel):
        return []
    snapshots = trained.snapshots(runtime.path("--model", options.workdir or options.model))
    return [(snapshot.step, model_lib.TrainedModel(snapshot)) for snapshot in snapshots]


def _models(model: LazyModel, request: Request) -> Iterator[tuple[str, LazyModel]]:
    """Yields a description of each model that reports read, and the model."""
    yield model.name, model
    if request.beside is not None:
        yield f"{request.beside.name} (--beside)", request.beside
    for step, snapshot in request.snapshots:
        yield f"the snapshot of step {step} of {model.name}", snapshot


def _check_weights(description: str, model: LazyModel) -> None:
    """Raises a UserError that names the layer whose weights are unreadable or not finite."""
    with progress.waiting(f"checking the weights of {description}"):
        paths = list(model.parameters())
        for path in paths:
            if path[0] != "segments":
                _check_weight(description, model, path)
        for layer in range(len(model.transformer.mechanisms)):
            segment, position = model_lib.layer_of(model, layer)
            for path in paths:
                if path[:2] == ("segments", segment):
                    _check_weight(f"layer {layer} of {description}", model, path, position)


def _check_weight(where: str, model: LazyModel, path: Path, position: int | None = None) -> None:
    try:
        model.read(path, position)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _sections(
    modules: Mapping[str, types.ModuleType], model: LazyModel, request: Request
) -> tuple[dict[str, Section], dict[str, float]]:
    """Returns each report's section, and its seconds."""
    sections, seconds = {}, {}
    for name, module in modules.items():
        start = time.monotonic()
        with progress.waiting(f"{name} of {model.name}"):
            sections[name] = module.section(model, request)
        seconds[name] = time.monotonic() - start
    return sections, seconds


# -- output ----------------------------------------------------------------------------------------


def _about(
    options: argparse.Namespace, model: LazyModel, request: Request, seconds: Mapping[str, float]
) -> dict[str, str | Mapping]:
    """Returns facts on model, texts, command and machine, by the names that the page shows."""
    origin = provenance.provenance("matplotlib", "scipy")
    name = model.name
    if isinstance(model, model_lib.TrainedModel):
        name += f", checkpoint of step {model.step:,}"
    block = model.transformer.block
    parameters = formulas.parameters(model.transformer)["total"]
    return {
        "Model": name,
        "Beside": request.beside.name if request.beside else "",
        "Size": f"{block.num_layers} layers of width {block.d_model}, {parameters:,} parameters, "
        f"trained on {model.context:,} tokens at a time",
        "Attention": _attention(model),
        "Texts": {name: f"{len(tokens_T):,} tokens" for name, tokens_T in request.texts.items()},
        "Lengths": ", ".join(f"{length:,}" for length in request.lengths) + " tokens",
        "Seconds": {name: f"{value:.1f}" for name, value in seconds.items()},
        "Command": origin["command"],
        "Date": origin["date"],
        "Commit": origin["commit"],
        "Machine": f"{origin['machine']}; {origin['devices']}",
        "Versions": {"python": origin["python"]} | origin["packages"],
    }


def _attention(model: LazyModel) -> Mapping | str:
    """Returns the keys of config.attention, or a phrase if no config can express the layers."""
    try:
        settings = model_lib.attention_section(model.transformer)
        return {key: value for key, value in settings.items() if value not in (False, "none", ())}
    except UserError:
        return f"layers of several kinds: {words.mechanism_names(model.transformer.mechanisms)}"


def _write(
    target: epath.Path, model: LazyModel, sections: Mapping[str, Section], about: Mapping
) -> dict[str, int]:
    """Writes both files; returns the bytes of each.

    Raises:
      UserError: they cannot be written.
    """
    summary = [
        Point(section.title, section.finding, section.name)
        for section in sections.values()
        if section.finding
    ]
    html = document.page(
        f"Attention in {model.name}", _LEAD, list(sections.values()), about, summary=summary
    )
    contents = {
        name: dict(
            title=section.title, finding=section.finding, lead=section.lead, data=section.data
        )
        for name, section in sections.items()
    }
    text = json.dumps(json_text.plain(dict(about=about, reports=contents))) + "\n"
    files = {HTML: html.encode(), JSON: text.encode()}
    target_lib.write(target, files)
    return {name: len(content) for name, content in files.items()}


if __name__ == "__main__":
    command_line.run(main)
