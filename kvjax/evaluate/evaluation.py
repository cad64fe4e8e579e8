"""Asks a model all questions of its tasks, a block at a time, and keeps every row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import time
from typing import Any, NamedTuple

from etils import epath

from kvjax import sandbox
from kvjax.evaluate import core_tasks, generated, letters
from kvjax.evaluate.core_tasks import CoreTask
from kvjax.evaluate.datasets import Questions
from kvjax.evaluate.generated import AnswerOptions
from kvjax.evaluate.model import BenchmarkModel, ModelInfo
from kvjax.evaluate.rows import RowStore
from kvjax.evaluate.task import LETTERS
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one evaluation asks.

    Attributes:
      questions: by task, in the order that they are asked in.
      core: the tasks of CORE, if it is asked.
      answers: how texts are generated and judged.
      limit: only the first rows of each set; 0: all.
      share: (i, n): rows i mod n.
    """

    questions: Mapping[str, Questions]
    core: Sequence[CoreTask] = ()
    answers: AnswerOptions = AnswerOptions()
    limit: int = 0
    share: tuple[int, int] = (0, 1)

    def count(self, rows: int) -> int:
        return min(rows, self.limit or rows)


@dataclasses.dataclass
class TaskRows:
    """The rows of one task.

    Attributes:
      total: questions of the set, or as many as the limit asks.
      seconds: that this call took, for `asked` of the rows.
    """

    rows: dict[int, dict]
    total: int
    num_new: int
    seconds: float

    @property
    def right(self) -> int:
        return sum(row["right"] for row in self.rows.values())


class Checked(NamedTuple):
    """Result of checking a plan: warnings, and by task the digests of its rows' prompts."""

    warnings: list[str]
    prompts: dict[str, list[str]]


def check(model: ModelInfo | BenchmarkModel, plan: Plan, context: int) -> Checked:
    """Checks what can be, before anything expensive.

    Args:
      context: tokens that the model was trained on: what goes beyond is warned of.

    Raises:
      UserError: what cannot be asked.
    """
    said, digests = [], {}
    for name, found in plan.questions.items():
        items = found.items[: plan.count(len(found.items))]
        if found.task.kind == LETTERS:
            letters.check(model, items)
            prompts, more = [letters.prompt(model, item) for item in items], 0
        else:
            if name == "humaneval":
                _check_tests(items, found.places, plan.answers.helpers)
            prompts = [generated.prompt(model, item, plan.answers.mode) for item in items]
            more = plan.answers.num_tokens
        said += _lengths(model, name, found.places, prompts, more, context)
        digests[name] = [letters.prompt_hash(ids) for ids, _ in prompts]
    return Checked(said, digests)


def _check_tests(items, places, helpers: str) -> None:
    for item, place in zip(items, places, strict=False):  # of a limit, the first places
        try:
            test = generated.test(item, helpers)
            sandbox.check(sandbox.Problem("", test, item.entry_point))
        except sandbox.SandboxError as error:
            raise UserError(f"{place}: {error}") from error


def _lengths(model, name, places, prompts, more: int, context: int) -> list[str]:
    lengths = [len(ids) for ids, _ in prompts]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    needed = lengths[longest] + max(0, more - 1)
    if model.positions is not None and needed > model.positions:
        ask = f" and {more} to generate" if more else ""
        raise UserError(
            f"{places[longest]}: {lengths[longest]} tokens{ask}; the model's positions end after "
            f"{model.positions}: leave out {name}" + (", or lower --num_tokens" if more else "")
        )
    said = []
    if beyond := sum(length + more > context for length in lengths):
        said.append(
            f"{name}: {beyond:,} of {len(lengths):,} prompts may go past the {context:,} tokens "
            "that the model was trained on"
        )
    if cut := sum(is_cut for _, is_cut in prompts):
        said.append(f"{name}: {cut:,} prompts are longer than the limit, and lose their end")
    return said


@contextlib.contextmanager
def opened(
    plan: Plan,
    folder: epath.Path,
    identity: Callable[[str], Mapping[str, Any]],
    *,
    defaults: Mapping[str, Any],
    prompts: Mapping[str, Sequence[str]],
) -> Iterator[dict[str, RowStore]]:
    """The rows that are there, by task; this process's alone to add to.

    Args:
      folder: of the checkpoint's evaluations.
      identity: of a task, see `RowStore`.
      defaults: see `RowStore`.
      prompts: by task, see `RowStore`.

    Raises:
      UserError: rows of something else are there, or rows cannot be written.
    """
    with contextlib.ExitStack() as stack:
        stores = {}
        for name in names(plan):
            more = dict(defaults=defaults, prompts=prompts.get(name, ()))
            stores[name] = RowStore(folder, name, identity(name), plan.share, **more)
            stack.callback(stores[name].close)
        yield stores


def run(model: BenchmarkModel, plan: Plan, stores: Mapping[str, RowStore]) -> dict[str, TaskRows]:
    """All rows that are not done yet, and those that are.

    Raises:
      UserError: rows cannot be written.
    """
    found = {}
    for name, found_questions in plan.questions.items():
        items, task = found_questions.items, found_questions.task
        if task.kind == LETTERS:
            block = letters.BLOCK * model.batch
            ask = lambda indices, items=items: letters.ask(model, items, indices)
        else:
            block = model.batch
            ask = lambda indices, items=items: generated.ask(model, items, indices, plan.answers)
        found[name] = _run_task(name, stores[name], plan.count(len(items)), block, ask)
    for task in plan.core:
        name = core_tasks.label_of(task)
        ask = lambda indices, task=task: core_tasks.ask(model, task, indices)
        count = plan.count(len(task.items))
        found[name] = _run_task(name, stores[name], count, 2 * model.batch, ask)
    return found


def names(plan: Plan) -> list[str]:
    """The names under which a plan keeps rows: those of question sets, then of CORE tasks."""
    return [*plan.questions, *map(core_tasks.label_of, plan.core)]


def _run_task(name: str, store: RowStore, count: int, block: int, ask) -> TaskRows:
    missing, begun = store.missing(count), time.monotonic()
    within = lambda: {i: row for i, row in store.done.items() if i < count}
    with progress.Steps(count, len(within()), unit=f"{name}: row") as bar:
        for start in range(0, len(missing), block):
            new = ask(missing[start : start + block])
            store.add(new)
            right = sum(row["right"] for row in within().values())
            bar.step(f"{100 * right / len(within()):.1f} % right", len(new))
    store.reload()  # others may have written meanwhile
    return TaskRows(within(), count, len(missing), time.monotonic() - begun)
