"""`python -m kvjax.lm_eval`."""

import importlib.util
import json
import sys

import pytest

from kvjax.foundation import command_line
from kvjax.lm_eval import __main__ as command
from tests.lm_eval import local_tasks


@pytest.fixture
def run(workdir, folder, capfd):
    def run(*options, tasks="local_choices", **changed):
        given = dict(workdir=workdir, tasks=tasks, include_path=folder) | changed
        given = [f"--{name}={value}" for name, value in given.items() if value is not None]
        status = command_line.status(command.main, [*given, *options])
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def refused(run, monkeypatch):
    """Returns the command's message; fails if weights are read first."""
    from kvjax.workdir import checkpoint

    monkeypatch.delattr(checkpoint, "start_reading")

    def refused(*options, **changed):
        status, out, err = run(*options, **changed)
        assert (status, out) == (2, "") and "Traceback" not in err
        return " ".join(line for line in err.splitlines() if "Generating" not in line)

    return refused


def test_without_the_library_it_says_how_to_install_it(refused, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "--tasks needs lm_eval, which is not installed: pip install 'kvjax[l" in refused()


def test_wrong_options(refused):
    for changed, said in (
        (dict(workdir=""), "--workdir is missing"),
        (dict(workdir="no_such_run"), "no_such_run is no workdir of a run"),
        (dict(tasks=""), "--tasks is missing"),
        (dict(tasks="a,,b"), "--tasks=a,,b: has an empty name"),
        (dict(include_path="no_such_folder"), "--include_path = 'no_such_folder': must be a local"),
        (dict(limit=0), "--limit = 0: must be at least 1"),
        (dict(num_fewshot=-1), "--num_fewshot = -1"),
        (dict(batch_size=0), "--batch_size = 0: must be at least 1"),
        (dict(max_length=1), "--max_length = 1"),
        (dict(step=7), "--step = 7: "),
        (dict(dtype="float8"), "--dtype = "),
        (dict(chips=0), "chips = 0"),
        (dict(out="."), "--out = '.': "),
        (dict(out="/dev/null/x.json"), "--out = '/dev/null': "),
        (dict(system="be kind"), "--system: is for conversations"),
        (dict(seed=-1), "--seed = -1"),
    ):
        assert said in refused(**changed)


def test_a_model_without_conversations(refused):
    assert "--apply_chat_template: the model has no" in refused("--apply_chat_template")


@pytest.mark.lm_eval
def test_results_as_a_table_json_and_a_file(run, tmp_path):
    file = tmp_path / "a new" / "results.json"
    names = ",".join(local_tasks.TASKS)
    status, out, err = run("--json", tasks=names, max_length=48, out=file, limit=3, batch_size=2)
    assert status == 0, err
    result, kept = json.loads(out), json.loads(file.read_text())
    assert result == {key: value for key, value in kept.items() if key != "samples"}
    assert set(kept["samples"]) == set(local_tasks.TASKS)
    assert len(kept["samples"]["local_choices"]) == 3
    assert kept["model"]["step"] == 0 and kept["model"]["max_length"] == 48
    for name, metric in (("local_choices", "acc_norm"), ("local_texts", "bits_per_byte")):
        value = f"{kept['results'][name][f'{metric},none']:.4f}"
        assert any(
            line.split()[:1] == [name] and metric in line and value in line
            for line in err.splitlines()
        ), (name, err)
    assert not {"torch", "transformers"} & set(sys.modules)


UNSAFE = "output_type: generate_until\nunsafe_code: true\ndoc_to_text: x\ndoc_to_target: y\n"


@pytest.mark.lm_eval
def test_programs_of_a_model_are_not_run(refused, tmp_path):
    rows = [dict(x="1")]
    local_tasks.add(tmp_path, "runs_code", rows, f"tag: my_tag\n{UNSAFE}")
    (tmp_path / "group.yaml").write_text("group: my_group\ntask: [runs_code]\n")
    (tmp_path / "inner.yaml").write_text("group: outer\ntask: [my_group]\n")
    for name in ("runs_code", "runs_*", "my_tag", "my_group", "outer"):
        said = refused(tasks=name, include_path=tmp_path)
        assert "runs_code executes programs that the model writes" in said
        assert "python -m kvjax.evaluate --tasks=humaneval" in said
    for name in ("humaneval", "mbpp_instruct"):
        assert f"{name} executes programs" in refused(tasks=name, include_path=None)
