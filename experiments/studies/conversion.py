"""Converts trained models to smaller caches; perplexity by rank, before and after tuning.

    python -m experiments.studies.conversion --stage=whisper_ranks --whisper=FOLDER
    python -m experiments.studies.conversion --stage=whisper_tuning --whisper=FOLDER [--plan]
    python -m experiments.studies.conversion --stage=smollm2_ranks --smollm2=WORKDIR
    python -m experiments.studies.conversion --stage=smollm2_tuning --smollm2=WORKDIR
    python -m experiments.studies.conversion --markdown

Methods: thin keys (arXiv 2603.04427, sections 3.5 and 3.7) and LRKV. Models: the decoder of Whisper
tiny.en (MHA, 6 heads of 64; source: experiments/conversion/whisper.py) and SmolLM2-135M (GQA, 9
query heads over 3 KV heads, RoPE; a workdir from `python -m kvjax.convert`). The text is the
embedded corpus; perplexity is measured on its held-out split.

Each curve and each run is a record in experiments/results/conversion.jsonl. A stage makes only
missing records, so an interrupted stage resumes. A failure is recorded, and tried again by the next
call. The default stage, `report`, prints tables of these records, and draws
experiments/results/conversion/*.png.
"""

import argparse
from collections.abc import Callable
import fnmatch

from experiments import record
from experiments.conversion import (
    plots,
    records,
    smollm2,
    tables,
    whisper_converted,
    whisper_tuning,
)
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

_MEASURING = ("plan", "only", "validation_tokens")
STAGES = {  # by stage: the options that it takes
    "report": ("json", "markdown"),
    "whisper_ranks": ("whisper", *_MEASURING),
    "whisper_tuning": ("whisper", "tokens", "seeds", *_MEASURING),
    "smollm2_ranks": ("smollm2", *_MEASURING),
    "smollm2_tuning": ("smollm2", "tokens", "rate", "runs", *_MEASURING),
}
_DEFAULTS = {  # defaults of options, by model
    "validation_tokens": {"whisper": 8_192, "smollm2": 16_384},
    "tokens": {"whisper": 49_152, "smollm2": 100_352},
    "seeds": {"whisper": 3},
    "rate": {"smollm2": 5e-4},
    "runs": {"smollm2": "runs/conversion"},
}


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("--stage", default="report", help=f"{', '.join(STAGES)} (report)")
    add("--whisper", help="folder of Whisper tiny.en's model.bin and tokenizer.json")
    add("--smollm2", help="workdir of SmolLM2-135M")
    text = "print the number of missing results and the expected time; make none"
    add("--plan", action="store_true", help=text)
    add("--only", help="make only results whose names match this pattern, such as '*/lrkv_*'")
    text = "held-out tokens for perplexity (whisper 8192, smollm2 16384)"
    add("--validation_tokens", type=int, help=text)
    text = "tuning tokens per run (whisper 49152, smollm2 100352)"
    add("--tokens", type=int, help=text)
    add("--seeds", type=int, help="runs of each kind, with different orders of rows (3)")
    add("--rate", type=float, help="AdamW's learning rate (0.0005; the paper's is 0.00005)")
    add("--runs", help="folder of the workdirs (runs/conversion)")
    return parser


def _options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options, checked, with the stage's defaults."""
    options = _parser().parse(arguments)
    one_of("--stage", options.stage, tuple(STAGES))
    for names in STAGES.values():
        for name in names:
            _check_stage(options, name)
    subject = options.stage.partition("_")[0]
    for name, defaults in _DEFAULTS.items():
        if name in STAGES[options.stage] and getattr(options, name) is None:
            setattr(options, name, defaults[subject])
    for name in ("validation_tokens", "tokens", "seeds"):
        if name in STAGES[options.stage]:
            at_least(f"--{name}", getattr(options, name), 1)
    if "rate" in STAGES[options.stage] and not 0 < options.rate < 1:
        raise UserError(f"--rate = {options.rate}: must lie between 0 and 1")
    if options.runs == "":
        raise UserError("--runs= is empty: give a folder, as runs/conversion")
    return options


def _check_stage(options: argparse.Namespace, name: str) -> None:
    """Raises a UserError if an option of another stage is given."""
    if getattr(options, name) in (None, False) or name in STAGES[options.stage]:
        return
    stages = [stage for stage, names in STAGES.items() if name in names]
    raise UserError(f"--{name}: needs --stage={' or '.join(stages)}, not {options.stage}")


def _folder(options: argparse.Namespace, name: str):
    """Returns the existing folder of an option."""
    given = getattr(options, name)
    if not given:
        raise UserError(f"--{name} is missing: --stage={options.stage} needs its folder")
    path = runtime.path(f"--{name}", given)
    if not path.is_dir():
        raise UserError(f"--{name} = {given!r}: there is no such folder")
    return path


def _whisper(options: argparse.Namespace) -> whisper_converted.Subject:
    row_length = whisper_converted.Sizes.row_length
    rows = max(1, options.validation_tokens // row_length)
    sizes = whisper_converted.Sizes(validation_rows=rows)
    return whisper_converted.Subject(_folder(options, "whisper"), sizes)


def _whisper_tuning(options: argparse.Namespace) -> list[records.Task]:
    subject = _whisper(options)
    return whisper_tuning.tasks(subject, tokens=options.tokens, seeds=options.seeds)


def _smollm2(options: argparse.Namespace) -> smollm2.Subject:
    folder = _folder(options, "smollm2")
    return smollm2.Subject(folder, validation_tokens=options.validation_tokens)


def _smollm2_tuning(options: argparse.Namespace) -> list[records.Task]:
    runs = runtime.folder("--runs", options.runs)
    return smollm2.tuning_tasks(
        _smollm2(options), tokens=options.tokens, rate=options.rate, runs=runs
    )


_TASKS: dict[str, Callable[[argparse.Namespace], list[records.Task]]] = {
    "whisper_ranks": lambda options: whisper_converted.tasks(_whisper(options)),
    "whisper_tuning": _whisper_tuning,
    "smollm2_ranks": lambda options: smollm2.rank_tasks(_smollm2(options)),
    "smollm2_tuning": _smollm2_tuning,
}


def main(arguments: list[str]) -> int:
    """Runs a stage; returns 1 if a record failed."""
    options = _options(arguments)
    if options.stage == "report":
        return _report(options)
    record.check(not options.plan)
    runtime.start()
    tasks = _TASKS[options.stage](options)
    if options.only is not None:
        chosen = [task for task in tasks if fnmatch.fnmatch(task.name, options.only)]
        if not chosen:
            raise UserError(f"--only={options.only!r}: fits no name, as {tasks[0].name!r}")
        tasks = chosen
    left = records.missing(tasks)
    takes = progress.duration(records.seconds_left(tasks, left))
    command_line.say(f"{options.stage}: {len(left)} of {len(tasks)} results to make, about {takes}")
    if options.plan:
        return 0
    failures = records.make(left)
    if failures:
        command_line.say(f"{failures} of {len(left)} failed; --stage=report shows why")
    return 1 if failures else 0


def _report(options: argparse.Namespace) -> int:
    """Prints the tables of all results, and draws them."""
    out = Output(options)
    made = tables.report()
    if not made:
        out.say("There are no results yet: --help lists the stages that make them.")
    for table in made:
        out.show(table)
        out.say()
    plots.write()
    rows = [dict(title=t.title, header=list(t.header), rows=t.rows) for t in made]
    out.result(dict(name="conversion", tables=rows))
    return 0


if __name__ == "__main__":
    command_line.run(main)
