"""CORE (DCLM, arXiv 2406.11794): 22 few-shot tasks for base models, scored as by nanochat.

The bundle is a folder with `core.yaml`, `eval_meta_data.csv` and `eval_data/`. Rows are shuffled by
Random(1337); the shots of row i are drawn from the other rows by Random(1234 + i). An answer is
appended to the shots and its question; of several answers, the one with the lowest mean loss per
token (nats) is chosen. CORE is the mean of (accuracy - chance)/(1 - chance).
"""

import collections
from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import math
import os
import random
import re
from typing import Any

from etils import epath
import numpy as np

from kvjax.data import readers, records
from kvjax.decoding.scoring import Scored
from kvjax.evaluate.letters import prompt_hash
from kvjax.evaluate.model import BenchmarkModel
from kvjax.foundation.errors import DataError, MissingDataError, first_line
from kvjax.foundation.text import check_text

KINDS = ("multiple_choice", "schema", "language_modeling")
_KEYS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
COUNT = 22
_BASELINE = "Random baseline"
_LABEL = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # float() takes 2_5 for 25
Sequences = list[tuple[list[int], list[int]]]  # contexts and continuations, as token ids


@dataclasses.dataclass(frozen=True)
class CoreTask:
    """A task of CORE.

    Attributes:
      label: its name.
      kind: one of KINDS.
      delimiter: between a question and its answer.
      chance: accuracy of guessing.
      items: rows, shuffled.
      places: file and row number of each, for messages.
    """

    label: str
    kind: str
    shots: int
    delimiter: str
    chance: float
    items: Sequence[dict]
    places: Sequence[str]
    file: epath.Path


def read(folder: epath.Path) -> list[CoreTask]:
    """Reads the tasks of a bundle.

    Raises:
      MissingDataError: a file is missing.
      DataError: a file that cannot be read, with file and row.
    """
    for name in ("core.yaml", "eval_meta_data.csv", "eval_data"):
        if not (folder / name).exists():
            raise MissingDataError(
                f"core: {os.fspath(folder / name)} is missing: the bundle of DCLM's CORE has "
                "core.yaml, eval_meta_data.csv and eval_data/. Download "
                "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip, 162 MB"
            )
    baselines = _baselines(folder / "eval_meta_data.csv")
    tasks = [_task(folder, entry, baselines) for entry in _entries(folder / "core.yaml")]
    for label, count in collections.Counter(task.label for task in tasks).items():
        if count > 1:
            raise DataError(f"{os.fspath(folder / 'core.yaml')}: {count} tasks are named {label}")
    return tasks


def digest(folder: epath.Path, tasks: Sequence[CoreTask]) -> str:
    """Returns the SHA-256 of all files that a bundle's tasks are read from."""
    names = [folder / "core.yaml", folder / "eval_meta_data.csv"]
    return records.digest([*names, *(task.file for task in tasks)])


def _entries(path: epath.Path) -> list[dict]:
    import yaml

    keys = {"label", "dataset_uri", "num_fewshot", "icl_task_type"}
    try:
        found = yaml.safe_load(readers.read_bytes(path))["icl_tasks"]
        if not isinstance(found, list) or not found:
            raise ValueError("icl_tasks must be a list of one task or more")
        for number, entry in enumerate(found, 1):
            if not isinstance(entry, dict) or not keys <= entry.keys():
                raise ValueError(f"task {number} of icl_tasks needs {', '.join(sorted(keys))}")
        return found
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{os.fspath(path)} lists no tasks: {first_line(error)}") from error


def _baselines(path: epath.Path) -> dict[str, list[tuple[str, str | None]]]:
    """Returns the accuracy of guessing by task, as (position, cell in %)."""
    name, label = os.fspath(path), "Eval Task"
    try:
        rows = csv.DictReader(io.StringIO(readers.read_bytes(path).decode("utf-8-sig"), newline=""))
        if not {label, _BASELINE} <= set(rows.fieldnames or ()):
            raise DataError(f'{name} must have columns "{label}" and "{_BASELINE}"')
        found = collections.defaultdict(list)
        for row in rows:
            found[row[label]].append((f"{name}, line {rows.line_num}", row[_BASELINE]))
        return dict(found)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name} is no CSV in UTF-8: {first_line(error)}") from error


def _task(folder: epath.Path, entry: dict, baselines: Mapping) -> CoreTask:
    label, kind, uri = entry["label"], entry["icl_task_type"], entry["dataset_uri"]
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise DataError(
            f"{os.fspath(folder / 'core.yaml')}: label = {label!r:.200}: names files: must be up "
            "to 100 letters, digits, '_', '-' and '.'"
        )
    place = f"{os.fspath(folder / 'core.yaml')}: {label}"
    if kind not in KINDS:
        raise DataError(f"{place}: icl_task_type = {kind!r:.200}: must be one of {KINDS}")
    delimiter = entry.get("continuation_delimiter", " ")
    for key, text in dict(dataset_uri=uri, continuation_delimiter=delimiter).items():
        if not isinstance(text, str):
            raise DataError(f"{place}: {key} = {text!r:.200}: must be text")
        check_text(f"{place}: {key}", text)
    if label not in baselines:
        raise DataError(
            f"{os.fspath(folder / 'eval_meta_data.csv')} has no row of {label}: what does guessing "
            "score?"
        )
    cell, *more = baselines[label]
    if more:
        raise DataError(f"{more[0][0]}: {label} has a row already: keep one of them")
    path = folder / "eval_data" / uri
    if not path.is_file():
        raise MissingDataError(
            f"{place}: dataset_uri = {uri!r}: {os.fspath(path)} is no file: fetch the bundle again"
        )
    chance = _chance(*cell)
    pairs = [(item, place) for place, item in records.read(path)]
    for item, place_of_item in pairs:
        _check_row(item, kind, place_of_item)
    shots = _shots(place, entry["num_fewshot"], path, len(pairs))
    random.Random(1337).shuffle(pairs)
    items, places = zip(*pairs, strict=True)
    return CoreTask(label, kind, shots, delimiter, chance, items, places, path)


def _chance(place: str, text: str | None) -> float:
    """Returns the accuracy of guessing as a fraction, from its cell in %."""
    chance = float(text) / 100 if _NUMBER.fullmatch((text or "").strip()) else math.nan
    if not 0 <= chance < 1:
        said = f"{place}: {_BASELINE} = {text!r:.80}"
        raise DataError(f"{said}: must be a number from 0 to below 100")
    return chance


def _shots(place: str, given: object, path: epath.Path, rows: int) -> int:
    """Returns the number of few-shot examples: num_fewshot, or its first element."""
    shots = given[0] if isinstance(given, list) and given else given
    if type(shots) is not int or shots < 0:
        raise DataError(f"{place}: num_fewshot = {given!r:.200}: must be a whole number from 0")
    if shots >= rows:
        raise DataError(
            f"{place}: num_fewshot = {shots}: {os.fspath(path)} has {rows} rows; each needs as "
            "many others"
        )
    return shots


def _check_row(item, kind: str, place: str) -> None:
    """Raises a DataError for a row without the keys of its kind."""
    keys = _KEYS[kind]
    if not isinstance(item, dict) or (lacking := [key for key in keys if key not in item]):
        lacking = ", ".join(lacking if isinstance(item, dict) else keys)
        raise DataError(f"{place}: lacks {lacking}, which {kind} needs")
    for key in keys:
        if key in ("choices", "context_options"):
            several = item[key]
            is_list = isinstance(several, list) and len(several) > 0
            if not is_list or not all(isinstance(x, str) for x in several):
                raise DataError(f"{place}: {key} must be a list of texts, not {several!r:.80}")
            if type(item["gold"]) is not int or item["gold"] not in range(len(several)):
                raise DataError(
                    f"{place}: gold = {item['gold']!r}: must be 0 to {len(several) - 1}"
                )
        elif key != "gold" and not isinstance(item[key], str):
            raise DataError(f"{place}: {key} must be text, not {type(item[key]).__name__}")
    if kind == "language_modeling" and not item["continuation"].strip():
        raise DataError(f"{place}: continuation is blank: there is nothing to score")


def ask(model: BenchmarkModel, task: CoreTask, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Scores some rows; returns a record for each."""
    sequences, owners = [], []
    for i in indices:
        new = prompts(model, task, i)
        sequences += new
        owners.append((i, len(new)))
    scored, rows, start = model.continuations(sequences), [], 0
    for i, count in owners:
        rows.append(_row(task, i, sequences[start : start + count], scored[start : start + count]))
        start += count
    return rows


def _row(task: CoreTask, i: int, sequences: Sequences, scored: Sequence[Scored]) -> dict:
    row = dict(index=i, prompt=prompt_hash([*sequences[0][0], *sequences[0][1]]))
    if task.kind == "language_modeling":
        (only,) = scored
        return row | dict(nats=round(float(only.nats.mean()), 5), right=only.is_greedy)
    means = [float(np.mean(s.nats, dtype=np.float64)) for s in scored]
    chosen, gold = int(np.argmin(means)), int(task.items[i]["gold"])
    rounded = [round(mean, 5) for mean in means]
    return row | dict(nats=rounded, chosen=chosen, answer=gold, right=chosen == gold)


def prompts(model: BenchmarkModel, task: CoreTask, i: int) -> Sequences:
    """Returns a row's sequences to score: per answer, the tokens before it and its own."""
    rng = random.Random(1234 + i)
    others = [j for j in range(len(task.items)) if j != i]
    shots = [task.items[j] for j in rng.sample(others, task.shots)] if task.shots else []
    item, place = task.items[i], task.places[i]

    def encode(text: str) -> list[int]:
        return [model.tokenizer.bos_id, *model.tokenizer.encode(text)]

    if task.kind == "language_modeling":
        before = "".join(
            _shot(shot["context"].strip(), shot["continuation"], task) for shot in shots
        )
        before += item["context"].strip() + task.delimiter
        without, whole = encode(before.strip()), encode(before + item["continuation"])
        if whole[: len(without)] != without or len(whole) == len(without):
            raise DataError(
                f"{place}: the prompt's tokens are not a prefix of those of prompt and answer"
            )
        return [_fitting(model, whole, len(without))]
    if task.kind == "multiple_choice":
        before = "".join(_shot(s["query"], s["choices"][s["gold"]], task) for s in shots)
        before += item["query"] + task.delimiter
        found = [encode(before + choice) for choice in item["choices"]]
        start = _shared(found)  # tokens of the choices begin behind the common prefix
        return [_fitting(model, ids, min(start, len(ids) - 1)) for ids in found]
    before = "".join(_shot(s["context_options"][s["gold"]], s["continuation"], task) for s in shots)
    tail = task.delimiter + item["continuation"]
    found = [encode(before + option + tail) for option in item["context_options"]]
    size = _shared([ids[::-1] for ids in found])  # the options differ, the continuation is common
    return [_fitting(model, ids, max(1, len(ids) - size)) for ids in found]


def _shot(question: str, answer: str, task: CoreTask) -> str:
    return f"{question}{task.delimiter}{answer}\n\n"


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """Returns the length of the common prefix."""
    count = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def _fitting(model: BenchmarkModel, ids: list[int], start: int) -> tuple[list[int], list[int]]:
    """Splits ids into context and continuation; drops the start of what exceeds the positions."""
    if model.positions is not None and len(ids) - 1 > model.positions:
        excess = len(ids) - 1 - model.positions
        ids, start = ids[excess:], max(1, start - excess)
    return ids[:start], ids[start:]


def label_of(task: CoreTask) -> str:
    """Returns the name of a task's files of rows."""
    return f"core_{task.label}"
