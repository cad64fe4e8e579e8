"""Time of an evaluation: letters of multiple choice, and answers one by one or in batches.

    python -m experiments.benchmarks.evaluation_speed --workdir=runs/smollm2 --data=FOLDER [--save]

Letters: all questions of mmlu.jsonl with the prompts of `python -m kvjax.evaluate --tasks=mmlu`,
with and without compilation. Answers: the first --prompts questions of GSM8K, up to --num_tokens
tokens each, one after another and --batch at once, alternating --repeats times. Prints a table of
medians, and the number of answers whose tokens are the same in both.
"""

import argparse
import statistics
import time

from etils import epath

from experiments import record
from kvjax.decoding.generator import Generator
from kvjax.evaluate import datasets, generated, letters
from kvjax.evaluate.model import CachedModel
from kvjax.evaluate.task import TASKS
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.output import Output
from kvjax.workdir import dialogue as dialogue_lib, trained


def measure(workdir: epath.Path, data: str, sizes: dict) -> dict:
    """Returns seconds of letters, and seconds and tokens of answers by batch."""
    found = trained.find(workdir)
    questions = {name: datasets.read(TASKS[name], data).items for name in ("mmlu", "gsm8k")}
    loaded = trained.load(workdir)
    generator = Generator(loaded.model, loaded.compute)
    talk = dialogue_lib.of(found)
    served = lambda batch: CachedModel(generator, found.tokenizer, talk, batch=batch)
    mmlu, batch = questions["mmlu"], sizes["batch"]
    with progress.waiting("letters"):
        model, block = served(batch), letters.BLOCK * batch
        begun = time.perf_counter()
        whole = _letters(model, mmlu, block)  # with what is compiled
        first = time.perf_counter() - begun
        begun = time.perf_counter()
        again = _letters(model, mmlu, block)
        seconds = time.perf_counter() - begun
    assert whole == again
    prompts = [generated.prompt(model, item, "chat")[0] for item in questions["gsm8k"]]
    prompts = prompts[: sizes["prompts"]]
    runs = {1: [], batch: []}
    with progress.waiting("answers") as doing:
        for i in range(sizes["repeats"] + 1):
            for size, timed in runs.items():
                doing.at(f"{size} at once, {i} of {sizes['repeats']}")
                timed.append(_answers(served(size), prompts, sizes["num_tokens"]))
    alike = [a == b for a, b in zip(runs[1][0]["ids"], runs[batch][0]["ids"], strict=True)]
    return dict(
        letters=dict(questions=len(mmlu), seconds=seconds, first_seconds=first),
        answers=[
            dict(
                batch=size,
                tokens=timed[0]["tokens"],
                seconds=[run["seconds"] for run in timed[1:]],  # the first compiles
            )
            for size, timed in runs.items()
        ],
        texts_alike=sum(alike),
    )


def _letters(model: CachedModel, items, block: int) -> list[dict]:
    rows = []
    for start in range(0, len(items), block):
        rows += letters.ask(model, items, range(start, min(start + block, len(items))))
    return rows


def _answers(model: CachedModel, prompts: list[list[int]], num_tokens: int) -> dict:
    begun, ids = time.perf_counter(), []
    for start in range(0, len(prompts), model.batch):
        some = prompts[start : start + model.batch]
        ids += [answer.ids for answer in model.answers(some, num_tokens=num_tokens)]
    return dict(seconds=time.perf_counter() - begun, tokens=sum(map(len, ids)), ids=ids)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--workdir", default="runs/smollm2", help="of an instruction model (runs/smollm2)")
    add("--data", default=datasets.FOLDER, help=f"the folder of questions ({datasets.FOLDER})")
    add("--batch", type=int, default=8, help="prompts at once (8)")
    add("--prompts", type=int, default=16, help="questions that are answered (16)")
    add("--num_tokens", type=int, default=128, help="of an answer, at most (128)")
    add("--repeats", type=int, default=3, help="timed turns (3)")
    add("--save", action="store_true", help="write experiments/results/evaluation_speed.json")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--batch", options.batch, 2)
    for key in ("prompts", "num_tokens", "repeats"):
        at_least(f"--{key}", getattr(options, key), 1)
    record.check(options.save)
    return options


def main(arguments: list[str]) -> None:
    """Measures and prints; see the module's docstring."""
    options = _options(arguments)
    runtime.start()
    workdir, out = trained.find(options.workdir).workdir, Output(options)
    keys = ("batch", "prompts", "num_tokens", "repeats")
    sizes = {key: getattr(options, key) for key in keys}
    found = measure(workdir, options.data, sizes)
    asked = found["letters"]
    rows = [
        (
            f"letters of {asked['questions']:,} questions",
            f"{asked['seconds']:.0f} s",
            f"{asked['first_seconds']:.0f} s with what is compiled",
        )
    ]
    alone = statistics.median(found["answers"][0]["seconds"])
    for timed in found["answers"]:
        middle = statistics.median(timed["seconds"])
        rate = f"{timed['tokens'] / middle:.0f} tokens/s, {alone / middle:.1f} times as fast"
        rows.append(
            (f"{options.prompts} answers, {timed['batch']} at once", f"{middle:.0f} s", rate)
        )
    out.table((workdir.name, "", ""), rows)
    out.say(f"{found['texts_alike']} of {options.prompts} texts are the same, token by token")
    record.record(
        "evaluation_speed", dict(workdir=workdir.name, **sizes) | found, out, save=options.save
    )


if __name__ == "__main__":
    command_line.run(main)
