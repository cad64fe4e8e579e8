"""RULER: long-context tasks at chosen lengths, in the model's own tokens (Hsieh et al., 2024).

A prompt has the largest haystack with which prompt and answer fit into the length. It is a user's
message in the model's chat format (plain text for a model without one), followed by the start of
the answer (RULER's answer prefix). Answers are generated greedily. A score is the share of the
expected texts that the answer contains, ignoring case; for questions on documents one is enough.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import random
import re
from typing import Any

import numpy as np

from kvjax.conversation.dialogue import Dialogue
from kvjax.evaluate import ruler_materials, ruler_tasks
from kvjax.evaluate.letters import prompt_hash
from kvjax.evaluate.model import BenchmarkModel
from kvjax.evaluate.ruler_tasks import DOCUMENT_TASKS, Documents, Materials, RulerTask, Sample
from kvjax.evaluate.task import RULER
from kvjax.foundation import lists, progress
from kvjax.foundation.configuration import at_least, between
from kvjax.foundation.errors import UserError

LENGTHS, SAMPLES, SEED = "4096", 20, 0
MOST_TOKENS, MOST_SAMPLES = 1 << 24, 10_000
_NAME = re.compile(rf"{RULER}_\w+_(\d+)")
_CONTROLS = re.compile(r"[\x00-\x1f]")


@dataclasses.dataclass(frozen=True)
class Options:
    """RULER's settings, from the command's options.

    Attributes:
      left_out: tasks of --tasks=ruler that are skipped, because no file was given.
      files: files of questions and documents, by task.
    """

    tasks: tuple[str, ...]
    left_out: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    text: str
    files: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class RulerSet:
    """The questions of one task at one length.

    Attributes:
      prompts: token ids of each question.
      digest: digest of everything that determines the questions, except seed and tokenizer.
    """

    task: RulerTask
    length: int
    seed: int
    prompts: Sequence[np.ndarray]
    answers: Sequence[tuple[str, ...]]
    digest: str

    @property
    def name(self) -> str:
        return f"{RULER}_{self.task.name}_{self.length}"


def options(
    names: Sequence[str], files: Mapping[str, str], lengths: str, samples: int, seed: int, text: str
) -> Options | None:
    """Returns RULER's options, or None if none of its tasks is selected.

    Args:
      names: selected tasks of all benchmarks, such as "ruler" or "ruler_vt".
      files: paths of --file, by task.

    Raises:
      UserError: a value is out of range, a task lacks its file, or options are given without a
        task of RULER.
    """
    parsed = lists.integers("--ruler_lengths", lengths, 1, MOST_TOKENS)
    between("ruler_samples", samples, 1, MOST_SAMPLES)
    at_least("ruler_seed", seed, 0)
    named = [name.removeprefix(f"{RULER}_") for name in names if name.startswith(f"{RULER}_")]
    if RULER not in names and not named:
        settings = (lengths, samples, seed, text)
        if settings != (LENGTHS, SAMPLES, SEED, ruler_materials.EMBEDDED):
            raise UserError(
                "--ruler_...: no task of RULER is in --tasks: add ruler, or remove this option"
            )
        return None
    own_files = {t: files[f"{RULER}_{t}"] for t in DOCUMENT_TASKS if f"{RULER}_{t}" in files}
    for task in DOCUMENT_TASKS:
        if task in named and task not in own_files:
            raise UserError(f"ruler_{task} has no questions: {_file_advice(task)}")
    left_out = tuple(t for t in DOCUMENT_TASKS if RULER in names and t not in own_files)
    selected = [t for t in ruler_tasks.TASKS if RULER in names or t in named]
    tasks = tuple(t for t in selected if t not in left_out)
    return Options(tasks, left_out, parsed, samples, seed, text, own_files)


def _file_advice(task: str) -> str:
    return f"give --file=ruler_{task}=PATH, {ruler_materials.PUBLISHED[task]}"


def check_lengths(settings: Options, positions: int | None, context: int) -> list[str]:
    """Returns warnings on tasks that are left out, and on lengths beyond the training length.

    Args:
      positions: maximum number of the model's positions; None: unlimited.
      context: training length in tokens.

    Raises:
      UserError: a length exceeds the model's positions.
    """
    longest = max(settings.lengths)
    if positions is not None and longest > positions:
        raise UserError(
            f"--ruler_lengths = {longest}: must be at most {positions:,}, the model's positions"
        )
    warnings = [f"ruler: {task} is left out: {_file_advice(task)}" for task in settings.left_out]
    if longest > context:
        warnings.append(f"ruler: {longest:,} tokens exceed the training length of {context:,}")
    return warnings


def make(settings: Options, dialogue: Dialogue) -> dict[str, RulerSet]:
    """Makes the questions of all tasks and lengths, by name.

    Raises:
      UserError: a length is too short for a task, or a text or file cannot be read.
    """
    documents = {
        task: ruler_materials.documents(task, path) for task, path in settings.files.items()
    }
    running_text = ruler_materials.running_text(settings.text, max(settings.lengths))
    words, sets = ruler_materials.words(), {}
    with progress.waiting("writing RULER's prompts") as doing:
        for length in settings.lengths:
            materials = Materials(length, words, running_text[:length], documents)
            for name in settings.tasks:
                doing.at(f"{name}, {length:,} tokens")
                made = _set(ruler_tasks.TASKS[name], materials, settings, dialogue)
                sets[made.name] = made
    return sets


def _set(task: RulerTask, materials: Materials, settings: Options, dialogue: Dialogue) -> RulerSet:
    own = materials.documents.get(task.name)
    samples = min(settings.samples, len(own.questions)) if own else settings.samples
    prompts, answers, size = [], [], 2 * task.least + 1
    for index in range(samples):
        size, sample = _fitting(task, materials, settings.seed, index, dialogue, size)
        prompts.append(np.array(prompt(dialogue, sample), np.int32))
        answers.append(sample.answers)
    digest = _digest(materials, own)
    return RulerSet(task, materials.length, settings.seed, prompts, answers, digest)


def _digest(materials: Materials, own: Documents | None) -> str:
    parts = [own.digest if own else "", *materials.words, "", *materials.running_text]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _fitting(
    task: RulerTask, materials: Materials, seed: int, index: int, dialogue: Dialogue, size: int
) -> tuple[int, Sample]:
    """Returns the size of the largest haystack that fits, and the question with that haystack.

    Args:
      size: the size to try first.

    Raises:
      UserError: not even the smallest haystack fits.
    """

    def sample(size: int) -> Sample:
        rng = random.Random(f"{seed} {task.name} {materials.length} {index}")
        return task.make(materials, rng, index, size)

    def tokens(size: int) -> int:
        return len(prompt(dialogue, sample(size))) + task.num_tokens

    least = tokens(task.least)
    if least > materials.length:
        raise UserError(
            f"--ruler_lengths = {materials.length}: too short for {task.name}, whose question "
            f"{index} takes {least:,} tokens with its answer: give a longer one, or leave "
            f"{task.name} out of --tasks"
        )
    size = largest(tokens, materials.length, task.least, least, size)
    return size, sample(size)


def largest(tokens: Callable[[int], int], most: int, low: int, low_tokens: int, size: int) -> int:
    """Returns a size with at most `most` tokens, where the next size has more.

    Interpolates between sizes whose tokens are known, since tokens are almost linear in the size.

    Args:
      tokens: returns the number of tokens at a size.
      low, low_tokens: a size that fits, and its number of tokens.
      size: the size to try first.
    """
    high = None
    while high is None or high - low > 1:
        size = max(size, low + 1) if high is None else min(max(size, low + 1), high - 1)
        counted = tokens(size)
        per_unit = max((counted - low_tokens) / (size - low), 0.25)
        if counted <= most:
            low, low_tokens = size, counted
        else:
            high = size
        size = min(low + int((most - low_tokens) / per_unit), 4 * size)
    return low


def prompt(dialogue: Dialogue, sample: Sample) -> list[int]:
    """Returns a question's token ids, with the start of its answer."""
    tokenizer = dialogue.tokenizer
    if not dialogue.name:
        return [tokenizer.bos_id, *tokenizer.encode(sample.text + sample.prefix)]
    return dialogue.begun([dict(role="user", content=sample.text)], sample.prefix.strip())


def ask(model: BenchmarkModel, ruler_set: RulerSet, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Generates and scores the answers to some questions, at most one batch; returns their rows."""
    prompts = [ruler_set.prompts[i].tolist() for i in indices]
    answers = model.answers(prompts, num_tokens=ruler_set.task.num_tokens)
    rows = []
    for i, ids, answer in zip(indices, prompts, answers, strict=True):
        expected = ruler_set.answers[i]
        value = score(answer.text, expected, any_answer=ruler_set.task.any_answer)
        row = dict(index=i, prompt=prompt_hash(ids), text=answer.text, tokens=len(answer.ids))
        rows.append(row | dict(answers=list(expected), score=value, right=value == 1))
    return rows


def score(text: str, answers: Sequence[str], *, any_answer: bool = False) -> float:
    """Returns the share of the answers that a text contains (RULER's string_match_all).

    Args:
      any_answer: return 1 if the text contains any answer, else 0 (string_match_part).
    """
    text = _CONTROLS.sub("\n", text).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if any_answer else sum(found) / len(found)


def by_length(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups the names of RULER's sets by their length, as "ruler_4096"; ignores other names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            groups.setdefault(f"{RULER}_{match[1]}", []).append(name)
    return groups
