"""Compares answers of an instruction model in kvjax and in transformers.

    make .venv-live/installed
    python -m experiments.evaluation.agreement --workdir=runs/smollm2 [--data=FOLDER] [--save]

Both use the same float32 weights, exported by kvjax; transformers renders the conversations with
its own code. Compares the letters that the models choose for MMLU, the log-likelihoods of MMLU's
right answers, and greedy texts for the first --texts prompts of GSM8K and HumanEval. Float32 sums
in another order change logits by about 1e-5, so texts may differ where the two likeliest tokens are
that close.
"""

from collections.abc import Sequence
import json
import pathlib
import subprocess
import tempfile

from etils import epath
import numpy as np

from experiments.benchmarks import runner
from experiments.benchmarks.beside_transformers import PYTHON, check_python
from experiments.benchmarks.runner import Option, Options
from kvjax.conversation import questions
from kvjax.convert import export, huggingface, into_folder, model as model_lib
from kvjax.decoding import answers
from kvjax.decoding.generator import Generator
from kvjax.decoding.scoring import Scorer
from kvjax.evaluate import datasets
from kvjax.evaluate.task import TASKS
from kvjax.foundation import command_line, progress
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.workdir import dialogue as dialogue_lib, trained

_CHILD = "import sys, transformers_answers as t; t.main(*sys.argv[1:])"
_SETS = ("mmlu", "gsm8k", "humaneval")


def theirs(python: str, folder: pathlib.Path, questions: dict) -> dict:
    """Returns transformers' answers; see transformers_answers.py."""
    with tempfile.TemporaryDirectory() as parent:
        files = [pathlib.Path(parent) / name for name in ("asked.json", "found.json")]
        files[0].write_text(json.dumps(questions))
        run = subprocess.run(
            [python, "-c", _CHILD, folder, *files],
            cwd=pathlib.Path(__file__).parent,  # kvjax is not in that environment
            check=False,
        )
        if run.returncode:
            raise UserError(f"transformers ended with status {run.returncode}")
        return json.loads(files[1].read_text())


def ours(workdir: epath.Path, questions: dict, batch: int) -> dict:
    """Returns kvjax's answers, in the form of `theirs`, and the ids that end a turn."""
    loaded = trained.load(workdir, dtype="float32")
    run = trained.find(workdir)
    generator = Generator(loaded.model, loaded.compute)
    dialogue = dialogue_lib.of(run)
    encode = loaded.tokenizer.encode

    def prompt(message: str) -> list[int]:
        return dialogue.prompt([dict(role="user", content=message)]).ids

    scorer = Scorer(generator, batch=batch)
    with progress.waiting("letters"):
        prompts = [prompt(message) for message, _ in questions["letters"]]
        letters = [[encode(letter)[0] for letter in letters] for _, letters in questions["letters"]]
        logits = scorer.choices(prompts, letters)
    with progress.waiting("log-likelihoods"):
        pairs = [
            (prompt(message), encode(answer)) for message, answer in questions["continuations"]
        ]
        scored = scorer.continuations(pairs)
    texts = []
    with progress.waiting("texts"):
        prompts_of_texts = [prompt(message) for message in questions["texts"]]
        for start in range(0, len(prompts_of_texts), batch):
            prompts_of_batch = prompts_of_texts[start : start + batch]
            replies = answers.answers(
                generator, dialogue, prompts_of_batch, num_tokens=questions["num_tokens"]
            )
            texts += [
                [*reply.ids, *([dialogue.ends[0]] if reply.is_ended else [])] for reply in replies
            ]
    return dict(
        letters=[
            dict(ids=ids, logits=row.tolist()) for ids, row in zip(prompts, logits, strict=True)
        ],
        continuations=[dict(log_likelihood=s.log_likelihood, tokens=len(s.nats)) for s in scored],
        texts=texts,
        ends=list(dialogue.ends),
    )


def questions_of(data: str, texts: int, limit: int) -> dict:
    """Returns the questions for kvjax and transformers.

    Args:
      texts: number of prompts from each of GSM8K and HumanEval.
      limit: number of MMLU questions; 0: all.
    """
    mmlu, gsm8k, humaneval = (datasets.read(TASKS[name], data).items for name in _SETS)
    mmlu = mmlu[: limit or len(mmlu)]
    ask = questions.multiple_choice
    return dict(
        letters=[(ask(item), item.letters) for item in mmlu],
        continuations=[
            (item.question, item.choices[item.letters.index(item.answer)]) for item in mmlu
        ],
        texts=[item.question for item in gsm8k[:texts]] + [p.prompt for p in humaneval[:texts]],
    )


def measure(workdir: epath.Path, python: str, questions: dict, batch: int) -> tuple[dict, dict]:
    """Returns the answers of kvjax and of transformers."""
    our_answers = ours(workdir, questions, batch)
    dtype = export.DTYPES["float32"]
    with tempfile.TemporaryDirectory() as parent, progress.waiting("transformers"):
        folder = pathlib.Path(parent) / "model"
        plan = huggingface.plan(model_lib.TrainedModel(workdir), dtype)
        into_folder.write(plan, epath.Path(folder), dtype)
        return our_answers, theirs(python, folder, questions)


def agreement(ours_answers: dict, their_answers: dict) -> dict:
    """Returns counts of equal answers and largest differences of two sets of answers."""
    pairs = list(zip(ours_answers["letters"], their_answers["letters"], strict=True))
    chosen = [[int(np.argmax(side["logits"])) for side in pair] for pair in pairs]
    likelihoods = [
        [c["log_likelihood"] for c in side["continuations"]]
        for side in (ours_answers, their_answers)
    ]
    ends = set(ours_answers["ends"])

    def trimmed(side: dict) -> list[list[int]]:
        return [ids[:-1] if ids and ids[-1] in ends else ids for ids in side["texts"]]

    texts = list(zip(trimmed(ours_answers), trimmed(their_answers), strict=True))
    return dict(
        prompts_alike=sum(a["ids"] == b["ids"] for a, b in pairs),
        letters=len(pairs),
        letters_alike=sum(a == b for a, b in chosen),
        logits_apart=max(_apart(a["logits"], b["logits"]) for a, b in pairs),
        log_likelihoods=len(likelihoods[0]),
        log_likelihoods_apart=_apart(*likelihoods),
        texts=len(texts),
        texts_alike=sum(a == b for a, b in texts),
        tokens=sum(len(b) for _, b in texts),
        tokens_alike=sum(_alike(a, b) for a, b in texts),
        first_differences=[_alike(a, b) for a, b in texts if a != b],
    )


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the largest absolute difference."""
    return float(np.max(np.abs(np.subtract(first, second)), initial=0))


def _alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens before the first difference."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


OPTIONS = {
    "workdir": Option("runs/smollm2", "workdir of the model"),
    "data": Option(datasets.FOLDER, "the folder of questions"),
    "python": PYTHON,
    "texts": Option(20, "prompts of each of GSM8K and HumanEval", least=1),
    "num_tokens": Option(512, "tokens per text, at most", least=1),
    "limit": Option(0, "questions of MMLU; 0: all", least=0),
    "batch": Option(8, "prompts at once in kvjax", least=1),
}


def compared(options: Options) -> dict:
    """Returns the result: `agreement` of kvjax and transformers, with model and versions."""
    workdir = trained.find(options.workdir).workdir
    check_python(options.python)
    questions = questions_of(options.data, options.texts, options.limit)
    questions |= dict(num_tokens=options.num_tokens)
    our_answers, their_answers = measure(workdir, options.python, questions, options.batch)
    about = dict(
        workdir=workdir.name, num_tokens=options.num_tokens, versions=their_answers["versions"]
    )
    return about | agreement(our_answers, their_answers)


def show(result: dict, out: Output) -> None:
    rows = [
        ("conversations with the same ids", f"{result['prompts_alike']} of {result['letters']}"),
        ("letters chosen alike", f"{result['letters_alike']} of {result['letters']}"),
        ("logits of letters, at most apart", f"{result['logits_apart']:.1e}"),
        ("log-likelihoods, at most apart", f"{result['log_likelihoods_apart']:.1e}"),
        ("greedy texts alike", f"{result['texts_alike']} of {result['texts']}"),
        ("tokens alike before a difference", f"{result['tokens_alike']:,} of {result['tokens']:,}"),
    ]
    out.table((f"{result['workdir']} in kvjax and transformers, float32", ""), rows)


main = runner.benchmark("agreement_with_transformers", __doc__, OPTIONS, compared, show)


if __name__ == "__main__":
    command_line.run(main)
