"""kvjax answers as lm-evaluation-harness's own `hf` model does; run by `make test-live`.

SAVE=1 make test-live  # stores the figures: experiments/results/lm_eval_agreement.json
"""

import json
import os
import subprocess

os.environ |= dict(HF_HUB_OFFLINE="1", DISABLE_MULTIPROC="1")

import lm_eval
from lm_eval.tasks import TaskManager
import numpy as np
import pytest

from experiments.record import RESULTS
from kvjax.convert import __main__ as convert
from kvjax.foundation import command_line, provenance
from kvjax.foundation.checkout import ROOT
from kvjax.lm_eval import adapter
from tests.lm_eval import local_tasks

PYTHON = ROOT / ".venv-live/bin/python"  # with torch, transformers and lm-evaluation-harness
ANSWERS = ROOT / "tests/lm_eval/answers_of_transformers.py"
TOLERANCE = 1e-4  # of a log-likelihood, in nats


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    subprocess.run([PYTHON, ANSWERS, folder], check=True)
    arguments = [f"--source={folder / 'model'}", f"--out={folder / 'workdir'}"]
    assert command_line.status(convert.main, arguments) == 0
    return folder, json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def figures():
    found = []
    yield found
    if os.environ.get("SAVE"):
        result = dict(tolerance=TOLERANCE, results=found)
        provenance.save(RESULTS / "lm_eval_agreement.json", result, "lm_eval", "tokenizers")


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("run", ["continuations", "texts", "prompts", "chat"])
def test_answers_equal_transformers(theirs, figures, run, batch, capsys):
    folder, stored = theirs
    names, _, chat = stored["runs"][run]
    expected = stored["found"][f"{run} {batch}"]
    model = adapter.KvjaxLM(folder / "workdir", dtype="float32", batch_size=batch)
    assert model.max_length == local_tasks.MAX_LENGTH
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=names,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    for name in names:
        answers = [sample["resps"] for sample in found["samples"][name]]
        comparison = _compared(answers, [resps for _, resps in expected["answers"][name]])
        for metric, value in expected["results"][name].items():
            ours = found["results"][name][metric]
            is_share = metric.startswith(("acc", "exact_match")) or isinstance(value, str)
            assert ours == value if is_share else ours == pytest.approx(value, rel=1e-4), metric
        shares = {k: v for k, v in expected["results"][name].items() if k.endswith(",none")}
        figures.append(dict(run=run, batch=batch, task=name) | comparison | dict(theirs=shares))
        with capsys.disabled():
            print(f"\n{run}, batch {batch}: {name}: {comparison}", end="")


def _compared(ours: list, theirs: list) -> dict:
    """Compares answers; fails if texts differ, or numbers by more than rounding."""
    if isinstance(theirs[0][0][0], str):
        assert ours == theirs and any(text for ((text,),) in ours)
        return dict(texts=len(ours), that_differ=0)

    def flat(answers):
        return np.concatenate([np.ravel(np.array(x, float)) for x in answers])

    ours, theirs = flat(ours), flat(theirs)
    assert ours.shape == theirs.shape
    difference = np.abs(ours - theirs)
    assert (difference < TOLERANCE + 2**-23 * np.abs(theirs)).all()  # theirs are float32 sums
    return dict(numbers=ours.size, largest_difference=float(difference.max()))
