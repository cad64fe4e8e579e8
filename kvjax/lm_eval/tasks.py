"""The tasks of lm-evaluation-harness: its own, and those of a folder of YAML files."""

from collections.abc import Iterator, Mapping, Sequence
import difflib
import fnmatch
import functools

from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from kvjax.foundation.errors import UserError, first_line
from kvjax.lm_eval import generation_settings

_NEAR = 5  # names that are offered for one of nothing


def read(
    names: Sequence[str], include_path: str, *, num_fewshot: int | None, max_length: int
) -> list[Task | Group]:
    """The tasks of these names, with their data; * and ? stand for anything.

    Args:
      include_path: a folder with more tasks; "": none.
      num_fewshot: examples that are shown; None: as many as a task says.
      max_length: tokens that the model reads.

    Raises:
      UserError: a name of nothing, a task that cannot be read, that runs a model's programs, asks
        with more than text, or for what the model cannot do.
    """
    manager, found = _manager(names, include_path)
    for name in found:
        for task, config in _configs(manager, name):
            if config.get("unsafe_code"):
                raise UserError(_unsafe(task))
    things = []
    for name in found:
        try:
            loaded = manager.load(name)
        except Exception as error:  # a YAML file may name any function, and any data
            raise UserError(
                f"--tasks: {name} cannot be read: {type(error).__name__}: {first_line(error)}"
            ) from error
        for task in loaded["tasks"].values():
            _check(task, num_fewshot, max_length)
        group = loaded["groups"].get(name)
        things += [group] if group is not None else loaded["tasks"].values()
    return things


def _manager(names: Sequence[str], include_path: str) -> tuple[TaskManager, list[str]]:
    """What knows these names, and all that they match.

    Reading the index of all tasks takes ten seconds: it is done where the folder's do not suffice.
    """
    if include_path:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        known = manager.task_index
        try:
            found = _matching(names, manager.all_tasks)
            members = (m for name in found for m, config in _configs(manager, name) if not config)
            if all(name in known for name in members):
                return manager, found
        except UserError:
            pass
    manager = TaskManager(include_path=include_path) if include_path else _all_tasks()
    return manager, _matching(names, manager.all_tasks)


@functools.cache
def _all_tasks() -> TaskManager:
    return TaskManager()


def _matching(names: Sequence[str], known: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        there = [name] if name in known else fnmatch.filter(known, name)
        if not there:
            near = difflib.get_close_matches(name, known, n=_NEAR) or [
                other for other in known if name.lower() in other.lower()
            ]
            hint = f"; near are {', '.join(near[:_NEAR])}" if near else ""
            raise UserError(f"--tasks: there is no {name!r} among {len(known):,} tasks{hint}")
        found += there
    return list(dict.fromkeys(found))


def _configs(
    manager: TaskManager, name: str, seen: set[str] | None = None
) -> Iterator[tuple[str, Mapping]]:
    """(name, YAML config) of a task, group or tag and of all its members; {} of unknown names."""
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
        if isinstance(member, Mapping):  # a task or group with changes, or one told in place
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
        raise UserError(f"--tasks: {name} asks with more than text, which the model does not read")
    if task.OUTPUT_TYPE == "loglikelihood_rolling" and num_fewshot:
        raise UserError(
            f"--num_fewshot={num_fewshot}: {name} scores texts, with no examples: give 0"
        )
    if task.OUTPUT_TYPE == "generate_until":
        try:
            generation_settings.parse(task.config.generation_kwargs or {}, max_length=max_length)
        except UserError as error:
            raise UserError(f"--tasks: {name}: {error}") from error


def _unsafe(name: str) -> str:
    return (
        f"--tasks: {name} runs programs that the model writes, and lm-evaluation-harness would run "
        "them as they are: python -m kvjax.evaluate --tasks=humaneval runs them in a sandbox"
    )
