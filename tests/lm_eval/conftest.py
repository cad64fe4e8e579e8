"""A small model, local tasks, and evaluation by lm-evaluation-harness."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.convert import workdirs
from tests.lm_eval import local_tasks, stand_in


@pytest.fixture(scope="package")
def workdir(tmp_path_factory):
    config = workdirs.config("nanochat", workdirs.grouped(4, 1, 3))  # has no sliding window
    return workdirs.write(tmp_path_factory.mktemp("lm_eval") / "model", config)


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return local_tasks.write(tmp_path_factory.mktemp("lm_eval") / "tasks")


@pytest.fixture(scope="package")
def evaluated():
    """A function of a model, a folder and names of tasks: the library's results."""

    def evaluate(model, folder, names=tuple(local_tasks.TASKS), **options):
        import lm_eval
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=str(folder), include_defaults=False)
        return lm_eval.simple_evaluate(
            model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, **options
        )

    return evaluate


@pytest.fixture(scope="module")
def library():
    """A stand-in for lm_eval."""
    with stand_in.installed() as package:
        yield package


@pytest.fixture
def index(library, monkeypatch):
    """A function of task names: the names of the tasks that are loaded from the stand-in."""
    from kvjax.lm_eval import tasks

    monkeypatch.setattr(stand_in.TaskManager, "library", stand_in.LIBRARY)
    monkeypatch.setattr(stand_in.TaskManager, "folders", dict(own=stand_in.OWN))
    monkeypatch.setattr(stand_in.TaskManager, "made", [])
    tasks._all_tasks.cache_clear()

    def read(*names, include_path="", num_fewshot=None, max_length=40):
        options = dict(num_fewshot=num_fewshot, max_length=max_length)
        found = tasks.read(names, include_path, **options)
        return [task if isinstance(task, str) else task.config.task for task in found]

    return read
