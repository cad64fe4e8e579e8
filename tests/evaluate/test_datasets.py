"""Question sets: published sizes, search paths, warnings for others."""

from etils import epath
import pytest

from kvjax.evaluate import datasets
from kvjax.evaluate.datasets import Questions
from kvjax.evaluate.task import NAMES, TASKS
from kvjax.foundation.errors import DataError, MissingDataError


def test_published_sets():
    """Row counts of the test splits, and the accuracy of guessing."""
    letters, generated = dict(kind="letters", chance=0.25), dict(kind="generated", chance=0.0)
    arc = letters | dict(fetch=("allenai/ai2_arc", "ai2_arc"))
    expected = dict(
        arc_easy=arc | dict(rows=2376),
        arc_challenge=arc | dict(rows=1172),
        mmlu=letters | dict(rows=14_042, fetch=("cais/mmlu", "mmlu")),
        gsm8k=generated | dict(rows=1319, fetch=("openai/gsm8k", "gsm8k")),
        humaneval=generated | dict(rows=164, fetch=("openai/openai_humaneval", "openai_humaneval")),
    )
    found = {task.name: vars(task) for task in TASKS.values()}
    assert {name: task | expected[name] for name, task in found.items()} == found
    assert NAMES[:7] == (*expected, "core", "ruler") and list(TASKS) == list(expected)


def test_search_paths(tmp_path, monkeypatch):
    """Finds files as downloaded, as in the authors' archive, and by task name."""
    places = dict(
        arc_easy=("ai2_arc/ARC-Easy/test-0.parquet", "ARC-Easy/ARC-Easy-Test.jsonl"),
        arc_challenge=(
            "ai2_arc/ARC-Challenge/test-0.parquet",
            "ARC-Challenge/ARC-Challenge-Test.jsonl",
        ),
        mmlu=("mmlu/all/test-0.parquet", "mmlu/test/anatomy_test.csv", "mmlu/test.jsonl"),
        gsm8k=("gsm8k/main/test-0.parquet", "gsm8k/test.jsonl"),
        humaneval=(
            "openai_humaneval/openai_humaneval/test-0.parquet",
            "HumanEval.jsonl.gz",
            "humaneval/any.jsonl",
        ),
    )
    for name, files in places.items():
        also = (f"{name}/test.jsonl",) if name.startswith("arc") else ()
        for i, file in enumerate((*files, *also, f"{name}.jsonl")):
            folder = tmp_path / f"{name}{i}"
            (folder / file).parent.mkdir(parents=True)
            (folder / file).write_text("")
            found = datasets._default_files(TASKS[name], str(folder))
            assert found == [epath.Path(folder / file)], file

    def fails(*_):
        raise OSError("it cannot be listed")

    monkeypatch.setattr(datasets.matching, "find", fails)
    command = f"hf download cais/mmlu --repo-type=dataset --local-dir={folder}/mmlu; or give"
    with pytest.raises(MissingDataError, match=f"mmlu: no file in {folder} .*{command}"):
        datasets._default_files(TASKS["mmlu"], str(folder))


def test_csv_empty_files_and_other_counts(tmp_path):
    task, (cells, empty) = TASKS["gsm8k"], (tmp_path / "cells.csv", tmp_path / "empty.jsonl")
    cells.write_text("1 + 1?,#### 2\n")
    empty.write_text("")
    for file, said in {
        cells: "cells.csv, row 1: gsm8k is not read from CSV: give JSON lines or Parquet",
        empty: "gsm8k: .*empty.jsonl has no row",
    }.items():
        with pytest.raises(DataError, match=said):
            datasets.read(task, "", str(file))
    cells.write_text("Which?,a,b,c,d,B\n")
    (item,) = datasets.read(TASKS["mmlu"], "", str(cells)).items
    assert (item.question, item.choices, item.answer) == ("Which?", ("a", "b", "c", "d"), "B")
    files = ("a", "b", "c", "d")
    sets = [Questions(task, range(count), (), files, "") for count in (1318, 1319)]
    assert datasets.other_counts(sets) == [
        "gsm8k: a, b, c has 1,318 rows, the published set has 1,319: scores are not comparable "
        "with published ones"
    ]
