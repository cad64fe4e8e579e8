"""The table of benchmarks: the five tasks of the LRKV paper's Table 3, in nanochat's format.

`core_tasks` has CORE (DCLM), for base models; `ruler` has RULER, for long contexts.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from kvjax.conversation import questions
from kvjax.evaluate import ruler_tasks

LETTERS, GENERATED = "letters", "generated"


@dataclasses.dataclass(frozen=True)
class Task:
    """A published set of questions.

    Attributes:
      name: the name in `--tasks`.
      kind: LETTERS: a letter is chosen; GENERATED: a text is generated and judged.
      rows: number of rows of the published set.
      chance: accuracy of guessing.
      parse: parses a row of a file, given its position for messages.
      parse_cells: parses a line of CSV in the same way, if the set is published as CSV.
      patterns: globs of files in the data folder; the first glob that matches is used.
      fetch: repository on Hugging Face's hub, and the folder to download it to.
    """

    name: str
    kind: str
    rows: int
    chance: float
    parse: Callable[[Any, str], Any]
    patterns: tuple[str, ...]
    fetch: tuple[str, str]
    parse_cells: Callable[[Any, str], Any] | None = None


def _arc(name: str, folder: str, rows: int) -> Task:
    patterns = (
        f"ai2_arc/{folder}/test-*.parquet",
        f"{folder}/{folder}-Test.jsonl",
        f"{name}/test*",
        f"{name}.jsonl",
    )
    fetch = ("allenai/ai2_arc", "ai2_arc")
    return Task(name, LETTERS, rows, 0.25, questions.arc, patterns, fetch)


TASKS = {
    task.name: task
    for task in (
        _arc("arc_easy", "ARC-Easy", 2376),
        _arc("arc_challenge", "ARC-Challenge", 1172),
        Task(
            "mmlu",
            LETTERS,
            14_042,
            0.25,
            questions.mmlu,
            ("mmlu/all/test-*.parquet", "mmlu/test/*_test.csv", "mmlu/test*", "mmlu.jsonl"),
            ("cais/mmlu", "mmlu"),
            questions.mmlu_csv,
        ),
        Task(
            "gsm8k",
            GENERATED,
            1319,
            0.0,
            questions.gsm8k_question,
            ("gsm8k/main/test-*.parquet", "gsm8k/test*", "gsm8k.jsonl"),
            ("openai/gsm8k", "gsm8k"),
        ),
        Task(
            "humaneval",
            GENERATED,
            164,
            0.0,
            questions.humaneval,
            (
                "openai_humaneval/openai_humaneval/test-*.parquet",
                "HumanEval.jsonl.gz",
                "humaneval/*",
                "humaneval.jsonl",
            ),
            ("openai/openai_humaneval", "openai_humaneval"),
        ),
    )
}
CORE, RULER = "core", "ruler"
NAMES = (*TASKS, CORE, RULER, *(f"{RULER}_{name}" for name in ruler_tasks.TASKS))
# Tasks whose file --file may name.
FILE_NAMES = (*TASKS, *(f"{RULER}_{name}" for name in ruler_tasks.DOCUMENT_TASKS))


def is_conversation(name: str, humaneval: str) -> bool:
    """Returns True if a task's prompts are conversations, so that they depend on a chat template.

    Args:
      humaneval: format of HumanEval's prompts, see `generated.MODES`.
    """
    if name == "humaneval":
        return humaneval == "chat"
    return name in TASKS or is_ruler(name)


def is_ruler(name: str) -> bool:
    """Returns True for names of RULER, its tasks and their rows: ruler, ruler_vt, ruler_vt_4096."""
    return name == RULER or name.startswith(f"{RULER}_")
