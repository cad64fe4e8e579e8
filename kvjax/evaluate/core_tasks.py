"""CORE (DCLM, arXiv 2406.11794): 22 few-shot tasks for base models, scored as by nanochat.

The bundle is a folder with `core.yaml`, `eval_meta_data.csv` and `eval_data/`. Rows are shuffled by
Random(1337); the shots of row i are drawn from the other rows by Random(1234 + i). A prompt is the
shots and a question; the model chooses the option with the lowest mean loss per token (in nats). In
language-modelling tasks, its greedy continuation must be the answer. CORE is the mean of
(accuracy - chance)/(1 - chance).
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import os
import random
from typing import Any

from etils import epath
import numpy as np

from kvjax.data import readers, records
from kvjax.decoding.scoring import Scored
from kvjax.evaluate.letters import prompt_hash
from kvjax.evaluate.model import BenchmarkModel
from kvjax.foundation.configuration import checked, one_of
from kvjax.foundation.errors import DataError, MissingDataError, first_line

_KEYS = dict(  # types of a row's keys, by kind of task
    multiple_choice=dict(query=str, choices=tuple[str, ...], gold=int),
    schema=dict(context_options=tuple[str, ...], continuation=str, gold=int),
    language_modeling=dict(context=str, continuation=str),
)
COUNT = 22
_BASELINE = "Random baseline"
Sequences = list[tuple[list[int], list[int]]]  # token ids of contexts and continuations


@dataclasses.dataclass(frozen=True)
class CoreTask:
    """A task of CORE.

    Attributes:
      label: name of the task.
      kind: one of multiple_choice, schema and language_modeling.
      delimiter: text between a question and its answer.
      chance: accuracy of guessing.
      items: shuffled rows.
      places: file and row number of each item, for messages.
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
      DataError: a file cannot be read; the message names file and row.
    """
    for name in ("core.yaml", "eval_meta_data.csv", "eval_data"):
        if not (folder / name).exists():
            raise MissingDataError(
                f"core: {os.fspath(folder / name)} is missing: the bundle of DCLM's CORE has "
                "core.yaml, eval_meta_data.csv and eval_data/. Download "
                "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip, 162 MB"
            )
    baselines = _baselines(folder / "eval_meta_data.csv")
    return [_task(folder, entry, baselines) for entry in _entries(folder / "core.yaml")]


def digest(folder: epath.Path, tasks: Sequence[CoreTask]) -> str:
    """Returns the SHA-256 of all files that a bundle's tasks are read from."""
    names = [folder / "core.yaml", folder / "eval_meta_data.csv"]
    return records.digest([*names, *(task.file for task in tasks)])


def _entries(path: epath.Path) -> list[dict]:
    import yaml

    try:
        entries = [dict(entry) for entry in yaml.safe_load(readers.read_bytes(path))["icl_tasks"]]
        if not entries:
            raise ValueError("icl_tasks is empty")
        return entries
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{os.fspath(path)} lists no tasks: {first_line(error)}") from error


def _baselines(path: epath.Path) -> dict[str, float]:
    """Returns the accuracy of guessing by task, as a fraction."""
    name, label = os.fspath(path), "Eval Task"
    try:
        text = readers.read_bytes(path).decode("utf-8-sig")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return {row[label]: float(row[_BASELINE]) / 100 for row in rows}
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name} is not CSV in UTF-8: {first_line(error)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'{name} must have columns "{label}" and "{_BASELINE}", the latter in %: '
            f"{first_line(error)}"
        ) from error


def _task(folder: epath.Path, entry: dict, baselines: Mapping[str, float]) -> CoreTask:
    where = f"{os.fspath(folder / 'core.yaml')}: "
    keys = ("label", "icl_task_type", "dataset_uri")
    label, kind, uri = (checked(entry.get(key), str, f"{where}{key}") for key in keys)
    place = f"{where}{label}"
    one_of(f"{place}: icl_task_type", kind, _KEYS)
    if label not in baselines:
        raise DataError(f"{os.fspath(folder / 'eval_meta_data.csv')} has no row of {label}")
    path = folder / "eval_data" / uri
    if not path.is_file():
        raise MissingDataError(
            f"{place}: dataset_uri = {uri!r}: {os.fspath(path)} does not exist: download the "
            "bundle again"
        )
    pairs = [(item, place) for place, item in records.read(path)]
    for item, place_of_item in pairs:
        _check_row(item, kind, place_of_item)
    shots = entry.get("num_fewshot")
    shots = shots[0] if isinstance(shots, list) and shots else shots
    if type(shots) is not int or not 0 <= shots < len(pairs):
        raise DataError(
            f"{place}: num_fewshot = {shots!r:.200}: must be less than the {len(pairs)} rows of "
            f"{os.fspath(path)}"
        )
    random.Random(1337).shuffle(pairs)
    items, places = zip(*pairs, strict=True)
    delimiter = entry.get("continuation_delimiter", " ")
    return CoreTask(label, kind, shots, delimiter, baselines[label], items, places, path)


def _check_row(item, kind: str, place: str) -> None:
    """Raises a DataError for a row without the keys of its kind."""
    if not isinstance(item, dict):
        raise DataError(f"{place}: must have {', '.join(_KEYS[kind])}")
    types = _KEYS[kind].items()
    row = {key: checked(item.get(key), type_, f"{place}: {key}") for key, type_ in types}
    if kind == "language_modeling":
        if not row["continuation"].strip():
            raise DataError(f"{place}: continuation is blank: there is nothing to score")
        return
    count = len(row.get("choices", row.get("context_options")))
    if not 0 <= row["gold"] < count:
        raise DataError(f"{place}: gold = {row['gold']}: must be 0 to {count - 1}")


def ask(model: BenchmarkModel, task: CoreTask, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Evaluates some rows; returns their saved form."""
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
    """Returns a row's (context, continuation) pairs of tokens, one per answer to score."""
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
                f"{place}: the prompt's tokens are not a prefix of the tokens of prompt and answer"
            )
        return [_fitting(model, whole, len(without))]
    if task.kind == "multiple_choice":
        before = "".join(_shot(s["query"], s["choices"][s["gold"]], task) for s in shots)
        before += item["query"] + task.delimiter
        sequences = [encode(before + choice) for choice in item["choices"]]
        start = _shared(sequences)  # the choices begin after the common prefix
        return [_fitting(model, ids, min(start, len(ids) - 1)) for ids in sequences]
    before = "".join(_shot(s["context_options"][s["gold"]], s["continuation"], task) for s in shots)
    tail = task.delimiter + item["continuation"]
    sequences = [encode(before + option + tail) for option in item["context_options"]]
    # The options differ, and the continuation is their common suffix.
    size = _shared([ids[::-1] for ids in sequences])
    return [_fitting(model, ids, max(1, len(ids) - size)) for ids in sequences]


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
    """Splits ids at `start` into context and continuation, after dropping leading excess tokens."""
    if model.positions is not None and len(ids) - 1 > model.positions:
        excess = len(ids) - 1 - model.positions
        ids, start = ids[excess:], max(1, start - excess)
    return ids[:start], ids[start:]


def label_of(task: CoreTask) -> str:
    """Returns the name of a task in results and in files of rows."""
    return f"core_{task.label}"
