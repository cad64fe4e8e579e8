"""Evaluates a trained model on benchmarks: the LRKV paper's Table 3, by nanochat's protocol.

    python -m kvjax.evaluate --workdir=runs/x --tasks=arc_easy,arc_challenge,mmlu,gsm8k,humaneval
    python -m kvjax.evaluate --workdir=runs/x --tasks=core --data=~/data
    python -m kvjax.evaluate --workdir=runs/x --tasks=ruler --ruler_lengths=1024,2048
    python -m kvjax.evaluate --compare=runs/a,runs/b

Benchmarks are read from local files; if one is missing, the message names the download. RULER's
prompts are generated, except those of its tasks qa_1 and qa_2, which need --file=ruler_qa_1=PATH.
Every row is saved at once in WORKDIR/evaluations/STEP/, so that the same command resumes a killed
evaluation. HumanEval's programs run in a sandbox. --compare evaluates nothing: it compares saved
rows.
"""

import argparse
from collections.abc import Mapping
import datetime
import hashlib
from typing import Any

from etils import epath

from kvjax import config as config_lib, sandbox
from kvjax.cache import quantized
from kvjax.conversation import calculator, render, specials as specials_lib
from kvjax.conversation.dialogue import Dialogue, PlainDialogue
from kvjax.decoding.generator import Generator, max_positions
from kvjax.evaluate import (
    compare,
    core_tasks,
    datasets,
    evaluation,
    generated,
    letters,
    rows,
    ruler,
    ruler_materials,
    summary,
    task as task_lib,
)
from kvjax.evaluate.evaluation import Plan
from kvjax.evaluate.generated import AnswerOptions, Verdict
from kvjax.evaluate.model import CachedModel, ModelInfo
from kvjax.foundation import command_line, lists, progress, runtime
from kvjax.foundation.configuration import at_least, one_of
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.output import Output
from kvjax.workdir import checkpoint, dialogue as dialogue_lib, origin, trained

BATCH = 8


def make_parser() -> command_line.Parser:
    """Returns the parser of the command's options."""
    parser = command_line.Parser(__doc__)
    parser.add_run()
    parser.add_output()
    add = parser.add_argument
    tasks = ", ".join(name for name in task_lib.NAMES if not name.startswith("ruler_"))
    text = f"some of {tasks}, or single tasks of RULER, such as ruler_vt (the first five)"
    add("--tasks", default="", help=text)
    add("--data", default=datasets.FOLDER, help=f"the folder of all data sets ({datasets.FOLDER})")
    text = "TASK=PATH: another file or glob for a task; may be repeated"
    add("--file", action="append", default=[], help=text)
    add("--batch", type=int, default=BATCH, help=f"prompts per batch ({BATCH})")
    add("--limit", type=int, default=0, help="first N rows of each set; 0: all (0)")
    text = f"maximum tokens of an answer ({generated.NUM_TOKENS})"
    add("--num_tokens", type=int, default=generated.NUM_TOKENS, help=text)
    text = "format of the calculator's output: nanochat: 8.0; dataset: 8 (nanochat)"
    add("--calculator", default=calculator.MODES[0], help=text)
    text = "chat: ask for the whole function; completion: continue the prompt (chat)"
    add("--humaneval", default=generated.MODES[0], help=text)
    text = "helper functions that 3 of HumanEval's tests call: program: the program's, as in the "
    text += "original; prompt: the prompt's, which no program can redefine (program)"
    add("--humaneval_helpers", default=generated.HELPERS[0], help=text)
    add("--sandbox", default="auto", help="auto, linux or wasm (auto: one that works here)")
    text = "run HumanEval's programs with limits but no sandbox; recorded in the results"
    add("--allow_unsandboxed_code", action="store_true", help=text)
    text = "I/N: evaluate every N-th row from row I on, so that N processes share the work (0/1)"
    add("--share", default="0/1", help=text)
    text = f"RULER: tokens of a prompt and its answer ({ruler.LENGTHS})"
    add("--ruler_lengths", default=ruler.LENGTHS, help=text)
    text = f"RULER: questions per task and length ({ruler.SAMPLES})"
    add("--ruler_samples", type=int, default=ruler.SAMPLES, help=text)
    text = f"RULER: seed of the questions ({ruler.SEED})"
    add("--ruler_seed", type=int, default=ruler.SEED, help=text)
    text = "RULER: text that needles are hidden in, as config.data.source (embedded)"
    add("--ruler_text", default=ruler_materials.EMBEDDED, help=text)
    add("--out", default="", help="folder of the rows (WORKDIR/evaluations/STEP or .../STEP_int8)")
    add("--compare", default="", help="two workdirs A,B: compare their saved rows")
    return parser


def main(arguments: list[str]) -> None:
    """Evaluates or compares; see the module's docstring."""
    options = make_parser().parse(arguments)
    out = Output(options)
    with command_line.naming_options(options):
        if options.compare:
            _compare(options, out)
        else:
            _evaluate(options, out)


def _compare(options: argparse.Namespace, out: Output) -> None:
    parser = make_parser()
    for name, value in vars(options).items():
        if name not in ("compare", "json", "markdown") and value != parser.get_default(name):
            raise UserError(
                f"--compare and --{name}: give one of them; --compare evaluates nothing"
            )
    names = compare.groups(options.compare)
    differences = compare.compare(*([compare.open(name) for name in side] for side in names))
    out.show(compare.table(differences, *names))
    out.result(dict(first=names[0], second=names[1], tasks=differences))


def _evaluate(options: argparse.Namespace, out: Output) -> None:
    command_line.require(options, workdir="the folder of a trained run, as runs/lrkv_tiny")
    names = _task_names(options.tasks)
    share = _share(options.share)
    for key, least in (("batch", 1), ("limit", 0), ("num_tokens", 1)):
        at_least(key, getattr(options, key), least)
    one_of("calculator", options.calculator, calculator.MODES)
    one_of("humaneval", options.humaneval, generated.MODES)
    one_of("humaneval_helpers", options.humaneval_helpers, generated.HELPERS)
    one_of("sandbox", options.sandbox, ("auto", "linux", "wasm"))
    files = datasets.file_options(options.file)
    for name in lists.names("--file", ",".join(files), task_lib.FILE_NAMES) if files else ():
        if name not in names and not (task_lib.is_ruler(name) and task_lib.RULER in names):
            raise UserError(f"--file={name}=...: {name} is not among --tasks={','.join(names)}")
    ruler_options = ruler.options(
        names,
        files,
        options.ruler_lengths,
        options.ruler_samples,
        options.ruler_seed,
        options.ruler_text,
    )
    if options.dtype:
        one_of("dtype", options.dtype, config_lib.DTYPES)
    quantized.bits_of(options.cache_dtype)
    runtime.start()
    saved = trained.find(runtime.workdir(options.workdir), step=options.step)
    trained.compute_of(saved.experiment, options.dtype, options.cache_dtype)  # or refuses them
    folder = saved.workdir / rows.FOLDER / rows.folder_of(saved.step, options.cache_dtype)
    folder = runtime.folder("--out", options.out) if options.out else folder
    positions = max_positions(saved.experiment.model)
    warnings = []
    if ruler_options:
        warnings = ruler.check_lengths(ruler_options, positions, saved.context)
    with progress.waiting("reading the data"):
        questions = {
            name: datasets.read(task_lib.TASKS[name], options.data, files.get(name, ""))
            for name in names
            if name in task_lib.TASKS
        }
        core, core_digest = [], ""
        if task_lib.CORE in names:
            bundle = runtime.folder("--data", options.data)
            bundle = bundle / "eval_bundle" if (bundle / "eval_bundle").exists() else bundle
            core = core_tasks.read(bundle)
            core_digest = core_tasks.digest(bundle, core)
    box = _box(options) if "humaneval" in names else None
    # The date of earlier rows, also over another cache: prompts stay, and scores can be compared.
    names_of_folders = [rows.folder_of(saved.step, dtype) for dtype in ("", *quantized.BITS)]
    folders = [epath.Path(folder), *(saved.workdir / rows.FOLDER / n for n in names_of_folders)]
    day = next(filter(None, map(rows.day, folders)), str(datetime.date.today()))
    dialogue = _dialogue(saved, names, options.humaneval, day)
    sets = {}
    if ruler_options:
        uncut = _dialogue(saved, names, options.humaneval, day, limit=ruler.MOST_TOKENS)
        sets = ruler.make(ruler_options, uncut)
    plan = Plan(questions, core, sets, _answer_options(options, box), options.limit, share)
    info = ModelInfo(saved.tokenizer, dialogue, positions)
    checked = evaluation.check(info, plan, saved.context)
    for text in [*warnings, *checked.warnings, *datasets.other_counts(questions.values())]:
        warn(text)
    data = datasets.data_info(questions)
    if core:
        data[task_lib.CORE] = dict(sha256=core_digest, tasks=len(core))
    data |= {name: dict(sha256=s.digest, seed=s.seed) for name, s in sets.items()}
    about = _about(options, saved, data, dialogue, box)
    with evaluation.opened(
        plan,
        epath.Path(folder),
        identities={
            name: _identity(name, about, data) | _letters(name, dialogue)
            for name in evaluation.names(plan)
        },
        defaults=_defaults(saved, about["options"]),
        prompts=checked.prompts,
    ) as stores:
        with progress.waiting("reading the model"):
            dtypes = dict(dtype=options.dtype, cache_dtype=options.cache_dtype)
            loaded = trained.load(saved.workdir, step=saved.step, **dtypes)
            generator = Generator(loaded.model, loaded.compute)
            del loaded  # frees the weights that the generator has converted
        model = CachedModel(generator, saved.tokenizer, dialogue, batch=options.batch)
        evaluated = evaluation.run(model, plan, stores)
    result = summary.make(evaluated, core, about, summary.read(epath.Path(folder)))
    try:
        path = summary.write(epath.Path(folder), result)
    finally:  # show the results even if they cannot be written
        out.show(summary.table(result))
    out.say(f"\nwritten: {path}", wrap=False)
    out.result(result)


# -- options ---------------------------------------------------------------------------------------


def _task_names(option: str) -> tuple[str, ...]:
    if not option:
        return tuple(task_lib.TASKS)
    return tuple(dict.fromkeys(lists.names("--tasks", option, task_lib.NAMES)))


def _share(option: str) -> tuple[int, int]:
    i, slash, n = option.partition("/")
    if slash and i.isdecimal() and n.isdecimal() and int(i) < int(n) <= 1 << 16:
        return int(i), int(n)
    raise UserError(f"--share={option}: give I/N with I from 0 to N - 1, as 0/4, 1/4, 2/4, 3/4")


def _box(options: argparse.Namespace):
    """Opens and tests the sandbox; raises a UserError if none works here."""
    kind = "none" if options.allow_unsandboxed_code else options.sandbox
    try:
        with progress.waiting("testing the sandbox"):
            return sandbox.open(kind)
    except sandbox.SandboxError as error:
        raise UserError(
            f"humaneval runs programs that a model wrote, and no sandbox works here: {error}. "
            "Remove humaneval from --tasks, or give --allow_unsandboxed_code on a machine that "
            "you can lose"
        ) from error


def _answer_options(options: argparse.Namespace, box) -> AnswerOptions:
    def judge(programs):
        problems = [sandbox.Problem(*program) for program in programs]
        try:
            verdicts = box.judge_all(problems)
        except sandbox.SandboxError as error:
            raise UserError(f"humaneval: the sandbox failed: {error}. Run it again") from error
        return [Verdict(v.passed, v.reason, v.retried) for v in verdicts]

    return AnswerOptions(
        options.num_tokens, options.calculator, options.humaneval, options.humaneval_helpers, judge
    )


def _dialogue(
    saved: trained.SavedModel,
    names: tuple[str, ...],
    mode: str,
    day: str,
    limit: int = render.LIMIT,
) -> Dialogue:
    """Returns the model's chat format, or plain text if it has none and no task needs one.

    Args:
      mode: format of HumanEval's prompts, one of `generated.MODES`.
      day: date for a chat template.
      limit: maximum tokens of prompts in nanochat's format, which are cut.
    """
    without_chat = {task_lib.CORE, "humaneval"} if mode == "completion" else {task_lib.CORE}
    of_ruler = {name for name in names if task_lib.is_ruler(name)}  # chat is optional for these
    is_plain = not of_ruler or saved.template is None
    if set(names) - of_ruler <= without_chat and is_plain and specials_lib.missing(saved.tokenizer):
        return PlainDialogue(saved.tokenizer)
    return dialogue_lib.of(saved, limit=limit, day=day)


# -- results ---------------------------------------------------------------------------------------


def _about(options, saved: trained.SavedModel, data: Mapping, dialogue, box) -> dict[str, Any]:
    tokenizer = hashlib.sha256(saved.tokenizer.to_json().encode()).hexdigest()
    about = dict(
        model=dict(
            workdir=str(saved.workdir),
            step=saved.step,
            checkpoint=checkpoint.fingerprint(saved.checkpoints, saved.step),
            tokenizer=tokenizer,
        ),
        data=data,
        options=dict(
            dialogue=dialogue.name,
            template=dialogue.digest,
            day=dialogue.day,
            ends=sorted(dialogue.ends),
            num_tokens=options.num_tokens,
            calculator=options.calculator,
            humaneval=options.humaneval,
            sandbox=" + ".join(box.layers) if box else "",
            dtype=str(
                trained.compute_of(saved.experiment, options.dtype, options.cache_dtype).dtype
            ),
            limit=options.limit,
        ),
    )
    if options.humaneval_helpers != generated.HELPERS[0]:  # earlier results lack the key
        about["options"]["humaneval_helpers"] = options.humaneval_helpers
    if options.cache_dtype:
        about["options"]["cache_dtype"] = options.cache_dtype
    return about


def _identity(name: str, about: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that determines the verdicts of a task."""
    task = task_lib.TASKS.get(name)
    options = about["options"]
    identity = dict(
        checkpoint=about["model"]["checkpoint"],
        tokenizer=about["model"]["tokenizer"],
        data=data[name if name in data else task_lib.CORE]["sha256"],
        dtype=options["dtype"],
        dialogue=options["dialogue"],
        **{key: options[key] for key in ("cache_dtype",) if key in options},
    )
    if task_lib.is_conversation(name, options["humaneval"]):
        identity |= dict(template=options["template"], day=options["day"])
    if task_lib.is_ruler(name):
        identity |= dict(seed=data[name]["seed"], ends=options["ends"])
    if task is not None and task.kind == task_lib.GENERATED:
        identity |= {key: options[key] for key in ("num_tokens", "ends", "calculator")}
    if name == "humaneval":
        keys = ("humaneval", "humaneval_helpers", "sandbox")
        identity |= {key: options[key] for key in keys if key in options}
    return identity


def _letters(name: str, dialogue: Dialogue) -> dict[str, list[int]]:
    """Returns the letters' tokens, unless they are those of letters alone, as in earlier rows."""
    task = task_lib.TASKS.get(name)
    if task is None or task.kind != task_lib.LETTERS:
        return {}
    ids = letters.letter_ids(dialogue, "ABCD")
    alone = [token for letter in "ABCD" for token in dialogue.tokenizer.encode(letter)]
    return {} if ids == alone else dict(letters=ids)


def _defaults(saved: trained.SavedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of identity keys that earlier versions of kvjax did not save.

    They ended answers at the tokens named in the model's files, and had nanochat's calculator.
    Template and day default to the present ones: if they differ, so does the saved prompt of a row.
    """
    ends = options["ends"]
    if options["dialogue"] != "nanochat":
        vocab_size = saved.experiment.model.vocab_size
        file_ends = origin.ends(saved.token_files, saved.tokenizer, vocab_size)
        ends = sorted({*file_ends, saved.tokenizer.bos_id})
    present = {key: options[key] for key in ("template", "day")}
    return present | dict(ends=ends, calculator=calculator.MODES[0])


if __name__ == "__main__":
    command_line.run(main)
