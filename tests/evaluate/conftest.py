"""Small sets of questions of all tasks."""

import json

import pytest

from tests.evaluate import oracles

CORE = """\
icl_tasks:
- {label: x, dataset_uri: x.jsonl, num_fewshot: [1], icl_task_type: multiple_choice}
- {label: y, dataset_uri: y.jsonl, num_fewshot: [0], icl_task_type: multiple_choice}
"""


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with every set and a bundle of CORE."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "eval_data").mkdir()
    (folder / "core.yaml").write_text(CORE)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nx,50\ny,25\n")
    for name, count in oracles.COUNTS.items():
        file = f"eval_data/{name[-1]}.jsonl" if name.startswith("core") else f"{name}.jsonl"
        lines = [json.dumps(oracles.row(name, i)) for i in range(count)]
        (folder / file).write_text("\n".join(lines) + "\n")
    return folder
