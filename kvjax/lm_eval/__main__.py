"""Runs tasks of lm-evaluation-harness on a trained model.

    python -m kvjax.lm_eval --workdir=runs/x --tasks=arc_easy,lambada_openai
    python -m kvjax.lm_eval --workdir=runs/x --include_path=~/tasks --tasks=mine --num_fewshot=5

Tasks are the library's own, whose data it downloads, or YAML files in a folder, which may name
local data. The library is an extra: pip install 'kvjax[lm-eval]'. Tasks that execute programs of
the model are refused; use kvjax.evaluate, which has a sandbox.
"""

import argparse
import contextlib
import json
import os
import sys

from kvjax import __version__
from kvjax.decoding.scoring import BATCH
from kvjax.foundation import (
    command_line,
    extras,
    json_text,
    progress,
    runtime,
    target as target_lib,
)
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

_BOOTSTRAP = 1000  # resamples for standard errors without a formula
_SAVED_KEYS = (
    "results",
    "groups",
    "group_subtasks",
    "versions",
    "n-shot",
    "n-samples",
    "higher_is_better",
    "configs",
    "samples",
)


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_run()
    parser.add_output()
    add = parser.add_argument
    text = "comma-separated names of tasks, groups or tags; * matches anything"
    add("--tasks", default="", help=text)
    add("--include_path", default="", help="a folder with more tasks, as .yaml files")
    add("--num_fewshot", type=int, help="few-shot examples per question (the task's)")
    add("--limit", type=int, help="first N questions of each task (all)")
    add("--batch_size", type=int, default=BATCH, help=f"sequences per batch ({BATCH})")
    add("--max_length", type=int, help="maximum tokens of a sequence (the training length)")
    text = "put questions into a conversation, in the model's chat format"
    add("--apply_chat_template", action="store_true", help=text)
    add("--system", default="", help="system message; needs --apply_chat_template")
    add("--chips", type=int, default=1, help="devices to shard a cache's tokens over (1)")
    add("--seed", type=int, default=0, help="seed of tasks that sample (0)")
    add("--out", default="", help="a JSON file for all results and answers")
    return parser


def main(arguments: list[str]) -> None:
    """Runs the evaluation; see the module's docstring."""
    values = _parser().parse(arguments)
    with command_line.naming_options(values):
        _run(values, Output(values))


def _run(options: argparse.Namespace, out: Output) -> None:
    names = _check_options(options)
    runtime.start()
    from kvjax.lm_eval import options as options_lib, prompts

    keys = ("step", "dtype", "cache_dtype", "batch_size", "max_length", "chips")
    settings = {key: getattr(options, key) for key in keys}
    saved_model = options_lib.find(runtime.workdir(options.workdir), **settings)
    if options.apply_chat_template and prompts.Prompts(saved_model).template is None:
        raise UserError(prompts.no_template())
    extras.require("--tasks", "lm_eval")
    with progress.waiting("importing lm-evaluation-harness"):
        import lm_eval

        from kvjax.lm_eval import adapter, tasks
    with progress.waiting("reading the tasks"):
        loaded_tasks = tasks.read(
            names,
            options.include_path,
            num_fewshot=options.num_fewshot,
            max_length=options.max_length or saved_model.context,
        )
    with progress.waiting("reading the model"):
        settings |= dict(step=saved_model.step, seed=options.seed)
        model = adapter.KvjaxLM(saved_model.workdir, **settings)
    with contextlib.redirect_stdout(sys.stderr):  # the library prints to stdout
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=loaded_tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            log_samples=bool(options.out),
            system_instruction=options.system or None,
            apply_chat_template=options.apply_chat_template,
            bootstrap_iters=_BOOTSTRAP,
        )
    saved = json_text.plain(_saved(results, model, options))
    text = json.dumps(saved, default=str, indent=1) + "\n"  # ASCII: tasks may hold surrogates
    try:
        if options.out:
            file = target_lib.check_file("--out", options.out)
            target_lib.write(file.parent, {file.name: text.encode()})
    finally:  # print the results even if the file cannot be written
        _print(results, text, out, saved=bool(options.out))
    if options.out:
        out.say(f"\nwritten: {options.out}", wrap=False)
    saved.pop("samples", None)
    out.result(json.loads(json.dumps(saved, default=str)))


def _print(results: dict, text: str, out: Output, *, saved: bool) -> None:
    """Prints the table; if that fails and no file was written, saves the results elsewhere."""
    try:
        out.table(*_table(results))
    except OSError as error:
        if saved or isinstance(error, BrokenPipeError):
            raise
        saved_where = target_lib.elsewhere({"results.json": text.encode()})
        message = f"the table cannot be printed ({error.strerror}). {saved_where}"
        raise UserError(message) from error


def _check_options(options: argparse.Namespace) -> list[str]:
    """Checks the options; returns the names of the tasks."""
    command_line.require(
        options,
        workdir="the folder of a trained run, as runs/lrkv_tiny",
        tasks="names of lm-evaluation-harness, as arc_easy,piqa",
    )
    for key, least in (("num_fewshot", 0), ("limit", 1), ("seed", 0)):
        if getattr(options, key) is not None:
            at_least(key, getattr(options, key), least)
    if options.system and not options.apply_chat_template:
        raise UserError("--system: is for conversations: add --apply_chat_template")
    names = [name.strip() for name in options.tasks.split(",")]
    if not all(names):
        raise UserError(f"--tasks={options.tasks}: has an empty name: separate names by commas")
    if options.include_path:
        folder = runtime.folder("--include_path", options.include_path)
        if not os.path.isdir(folder):
            raise UserError(f"--include_path = {options.include_path!r}: must be a local folder")
        options.include_path = os.fspath(folder)
    if options.out:
        target_lib.check_file("--out", options.out)
    return names


def _saved(results: dict, model, options: argparse.Namespace) -> dict:
    """Returns the results to save, with the model and the options."""
    import lm_eval

    about = model.get_model_info() | dict(
        batch_size=options.batch_size,
        limit=options.limit,
        seed=options.seed,
        apply_chat_template=options.apply_chat_template,
        system=options.system,
        kvjax=__version__,
        lm_eval=lm_eval.__version__,
    )
    return dict(model=about) | {key: results[key] for key in _SAVED_KEYS if key in results}


def _table(results: dict) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, values in {**results["results"], **results.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            shots = results["n-shot"].get(name, "")
            error = f"{error:.4f}" if isinstance(error, float) else ""
            value = f"{value:.4f}" if isinstance(value, float) else str(value)
            rows.append([name, filter_name, str(shots), metric, value, error])
    return ["task", "filter", "shots", "metric", "value", "standard error"], rows


if __name__ == "__main__":
    command_line.run(main)
