"""Loads tasks of lm-evaluation-harness: its own, and those in YAML files of a folder."""

from collections.abc import Iterator, Mapping, Sequence
import fnmatch
import functools

from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from kvjax.foundation.command_line import did_you_mean
from kvjax.foundation.errors import UserError, first_line
from kvjax.lm_eval import generation_settings


def read(
    names: Sequence[str], include_path: str, *, num_fewshot: int | None, max_length: int
) -> list[Task | Group]:
    """Loads tasks by name, with their data; * and ? are wildcards.

    Args:
      include_path: a folder with more tasks; "": none.
      num_fewshot: number of few-shot examples; None: the task's.
      max_length: maximum tokens of a sequence.

    Raises:
      UserError: a name is unknown; or a task cannot be read, executes programs of the model, has
        other inputs than text, or has unsupported generation settings.
    """
    manager, matched = _manager(names, include_path)
    for name in matched:
        for task, config in _configs(manager, name):
            if config.get("unsafe_code"):
                raise UserError(_unsafe(task))
    loaded_tasks = []
    for name in matched:
        try:
            loaded = manager.load(name)
        except Exception as error:  # a YAML file may call any function and load any data
            raise UserError(
                f"--tasks: {name} cannot be read: {type(error).__name__}: {first_line(error)}"
            ) from error
        for task in loaded["tasks"].values():
            _check(task, num_fewshot, max_length)
        group = loaded["groups"].get(name)
        loaded_tasks += [group] if group is not None else loaded["tasks"].values()
    return loaded_tasks


def _manager(names: Sequence[str], include_path: str) -> tuple[TaskManager, list[str]]:
    """Returns a task manager that knows these names, and all task names that they match.

    Indexing the library's tasks takes 10 s; this is skipped if the folder has all tasks that match.
    """
    if include_path:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        known = manager.task_index
        try:
            matched = _matching(names, manager.all_tasks)
            members = (m for name in matched for m, config in _configs(manager, name) if not config)
            if all(name in known for name in members):
                return manager, matched
        except UserError:
            pass
    manager = TaskManager(include_path=include_path) if include_path else _all_tasks()
    return manager, _matching(names, manager.all_tasks)


@functools.cache
def _all_tasks() -> TaskManager:
    return TaskManager()


def _matching(names: Sequence[str], known: Sequence[str]) -> list[str]:
    matched = []
    for name in names:
        of_name = [name] if name in known else fnmatch.filter(known, name)
        if not of_name:
            hint = did_you_mean(name, known)
            raise UserError(f"--tasks: {name!r} is none of {len(known):,} tasks{hint}")
        matched += of_name
    return list(dict.fromkeys(matched))


def _configs(
    manager: TaskManager, name: str, seen: set[str] | None = None
) -> Iterator[tuple[str, Mapping]]:
    """Yields (name, YAML config) of a task, group or tag and its members; {} for unknown names."""
    seen = set() if seen is None else seen
    if name in seen:
        return
    seen.add(name)
    entry = manager.task_index.get(name)
    if entry is None:
        yield name, {}
        return
    config = entry.cfg or {}
    yield name, config or dict(tag=name)
    members = config.get("task")
    members = members if isinstance(members, list) else sorted(entry.tags) if not config else []
    for member in members:
        if isinstance(member, Mapping):  # a task or group with overrides, or an inline one
            yield str(member.get("task", name)), member
            inner = member.get("task") or member.get("group")
            if isinstance(inner, str) and inner in manager.task_index:
                yield from _configs(manager, inner, seen)
        else:
            yield from _configs(manager, member, seen)


def _check(task: Task, num_fewshot: int | None, max_length: int) -> None:
    """Raises a UserError for a task that cannot be run."""
    name = task.config.task
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(_unsafe(name))
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"--tasks: {name} has other inputs than text, which the model cannot read")
    if task.OUTPUT_TYPE == "loglikelihood_rolling" and num_fewshot:
        raise UserError(
            f"--num_fewshot={num_fewshot}: {name} scores whole texts, without examples: give 0"
        )
    if task.OUTPUT_TYPE == "generate_until":
        try:
            generation_settings.parse(task.config.generation_kwargs or {}, max_length=max_length)
        except UserError as error:
            raise UserError(f"--tasks: {name}: {error}") from error


def _unsafe(name: str) -> str:
    return (
        f"--tasks: {name} executes programs that the model writes, and lm-evaluation-harness has "
        "no sandbox: python -m kvjax.evaluate --tasks=humaneval has one"
    )
