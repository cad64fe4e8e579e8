"""Scores token eviction by kvpress on RULER's questions, for comparison with the whole cache.

    python3.11 -m venv .venv-kvpress
    .venv-kvpress/bin/pip install torch==2.13.0 kvpress==0.5.5 'transformers<5.3'
    python -m experiments.evaluation.token_eviction --workdir=runs/smollm2 --task=vt [--save]

kvpress runs in a process of its own. It has the same float32 weights, exported by kvjax, and the
same token ids as `kvjax.evaluate --tasks=ruler`. A press (kvpress's word for a method) evicts
tokens once, after it has seen the whole prompt with its question, and keeps the share --cache of
them. All tokens of the answer stay. The press `none` keeps everything, and should have the scores
of `kvjax.evaluate`.
"""

from collections.abc import Iterator
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from etils import epath

from experiments.benchmarks import runner
from experiments.benchmarks.runner import Option, Options
from experiments.evaluation.scores import percent
from kvjax.convert import export, huggingface, into_folder, model as model_lib
from kvjax.evaluate import rows as rows_lib, ruler, ruler_materials, ruler_tasks, scores
from kvjax.evaluate.ruler import RulerSet
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.workdir import dialogue as dialogue_lib, trained

GENERATED = tuple(name for name in ruler_tasks.TASKS if name not in ruler_tasks.DOCUMENT_TASKS)
PRESSES = ("none", "snapkv", "expected_attention", "knorm", "streaming_llm")
_CHILD = "import sys, kvpress_answers as k; k.main(*sys.argv[1:])"


def _absolute(option: str, value: str) -> str:
    """Returns the path of a program, since kvpress starts in another folder."""
    del option
    return os.path.abspath(shutil.which(value) or value)


OPTIONS = {
    "workdir": Option("runs/smollm2", "workdir of the model"),
    "python": Option(
        str(ROOT / ".venv-kvpress/bin/python"),
        "Python with torch and kvpress",
        parse=_absolute,
    ),
    "press": Option(list(PRESSES), "press, may be repeated", known=PRESSES),
    "task": Option(["vt", "niah_single_1"], "task, may be repeated", known=GENERATED),
    "ruler_lengths": Option("1024", "tokens of a prompt and its answer"),
    "ruler_samples": Option(ruler.SAMPLES, "questions per task and length"),
    "cache": Option(0.5, "share of the prompt's tokens that are kept", least=0.01, most=1.0),
}


def measured(options: Options) -> dict:
    """Returns each press's score on each task, and the share of tokens that it kept."""
    run = trained.find(options.workdir)
    if not shutil.which(options.python):
        raise UserError(f"--python={options.python}: cannot be run; --help says how to make it")
    day = rows_lib.day(run.workdir / rows_lib.FOLDER / str(run.step))
    dialogue = dialogue_lib.of(run, limit=ruler.MOST_TOKENS, day=day)
    given = ruler.options(
        [f"ruler_{task}" for task in options.task],
        {},
        options.ruler_lengths,
        options.ruler_samples,
        ruler.SEED,
        ruler_materials.EMBEDDED,
    )
    sets = ruler.make(given, dialogue)
    questions = dict(
        presses=options.press,
        cache=options.cache,
        ends=list(dialogue.ends),
        tasks=[_questions(asked) for asked in sets.values()],
    )
    rows = [
        _scored(answers, sets[answers["task"]]) for answers in _answers(options, run, questions)
    ]
    return dict(workdir=run.workdir.name, cache=options.cache, rows=rows)


def _questions(asked: RulerSet) -> dict:
    prompts = [prompt.tolist() for prompt in asked.prompts]
    return dict(name=asked.name, num_tokens=asked.task.num_tokens, prompts=prompts)


def _answers(options: Options, run: trained.SavedModel, questions: dict) -> Iterator[dict]:
    """Yields kvpress's answers of each press and task; see kvpress_answers.py."""
    dtype = export.DTYPES["float32"]
    with tempfile.TemporaryDirectory() as parent, progress.waiting("kvpress") as doing:
        folder, asked = pathlib.Path(parent) / "model", pathlib.Path(parent) / "asked.json"
        plan = huggingface.plan(model_lib.TrainedModel(run.workdir), dtype)
        into_folder.write(plan, epath.Path(folder), dtype)
        asked.write_text(json.dumps(questions))
        process = subprocess.Popen(
            [options.python, "-c", _CHILD, folder, asked],
            stdout=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path(__file__).parent,  # kvjax is not in that environment
        )
        for line in process.stdout:
            answers = json.loads(line)
            doing.at(f"{answers['press']}, {answers['task']}")
            yield answers
        if process.wait():
            raise UserError(f"kvpress ended with status {process.returncode}")


def _scored(answers: dict, asked: RulerSet) -> dict:
    credits = [
        ruler.score(text, expected, any_answer=asked.task.any_answer)
        for text, expected in zip(answers["texts"], asked.answers, strict=True)
    ]
    score = scores.accuracy(sum(credits), len(credits))
    about = {key: answers[key] for key in ("press", "task", "kept")}
    return about | dict(questions=len(credits), score=score._asdict())


def show(result: dict, out: Output) -> None:
    header = ("task", "press", "tokens kept, %", "questions", "%", "interval")
    rows = []
    for row in sorted(result["rows"], key=lambda row: row["task"]):
        value, low, high = percent(row["score"])
        kept = f"{100 * row['kept']:.1f}"
        rows.append((row["task"], row["press"], kept, row["questions"], value, f"{low} to {high}"))
    out.table(header, rows)


main = runner.benchmark("token_eviction", __doc__, OPTIONS, measured, show)


if __name__ == "__main__":
    command_line.run(main)
