"""Writes the report of `python -m kvjax.analysis` for a model in memory."""

import json
import pathlib
import time

from etils import epath

from kvjax.analysis import reports
from kvjax.analysis.page import document
from kvjax.analysis.request import Request
from kvjax.convert.model import LazyModel
from kvjax.foundation import command_line, json_text, progress, provenance
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import write_atomically

HTML, JSON = "report.html", "report.json"  # the command's names


def write(model: LazyModel, request: Request, folder: pathlib.Path, lead: str) -> None:
    """Writes all reports that apply to the model to report.html and report.json.

    Args:
      lead: introduction of the page: a description of the model.
    """
    sections, seconds = {}, {}
    for name in reports.NAMES:
        module = reports.module(name)
        try:
            module.check(model, request)
        except UserError as error:
            command_line.say(f"without {name}: {error}")
            continue
        begun = time.monotonic()
        with progress.waiting(f"{name} of {model.name}"):
            sections[name] = module.section(model, request)
        seconds[name] = f"{time.monotonic() - begun:.1f}"
    made_by = provenance.provenance("matplotlib", "scipy")
    about = {
        "Model": model.name,
        "Texts": {name: f"{len(tokens_T):,} tokens" for name, tokens_T in request.texts.items()},
        "Lengths": ", ".join(f"{length:,}" for length in request.lengths) + " tokens",
        "Seconds": seconds,
        "Command": made_by["command"],
        "Date": made_by["date"],
        "Commit": made_by["commit"],
        "Machine": f"{made_by['machine']}; {made_by['devices']}",
        "Versions": {"python": made_by["python"]} | made_by["packages"],
    }
    reports_json = {
        name: dict(title=section.title, lead=section.lead, data=section.data)
        for name, section in sections.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    html = document.page(f"Attention in {model.name}", lead, list(sections.values()), about)
    write_atomically(epath.Path(folder / HTML), html)
    text = json.dumps(json_text.plain(dict(about=about, reports=reports_json))) + "\n"
    write_atomically(epath.Path(folder / JSON), text)
