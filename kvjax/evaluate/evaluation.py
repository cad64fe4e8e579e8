"""Runs the questions of all tasks in blocks, and saves every row."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import Any, NamedTuple

from etils import epath

from kvjax import sandbox
from kvjax.evaluate import core_tasks, generated, letters, ruler, scores
from kvjax.evaluate.core_tasks import CoreTask
from kvjax.evaluate.datasets import Questions
from kvjax.evaluate.generated import AnswerOptions
from kvjax.evaluate.model import BenchmarkModel, ModelInfo
from kvjax.evaluate.rows import RowStore
from kvjax.evaluate.ruler import RulerSet
from kvjax.evaluate.task import LETTERS
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError


@dataclasses.dataclass(frozen=True)
class Plan:
    """The questions of one evaluation.

    Attributes:
      questions: the questions of each task, by name.
      core: the tasks of CORE, if selected.
      ruler: the sets of RULER, if selected, by name.
      answers: options for generating and judging answers.
      limit: number of first rows to use of each set; 0: all.
      share: (i, n): use rows i, i + n, i + 2 n, ...
    """

    questions: Mapping[str, Questions]
    core: Sequence[CoreTask] = ()
    ruler: Mapping[str, RulerSet] = dataclasses.field(default_factory=dict)
    answers: AnswerOptions = AnswerOptions()
    limit: int = 0
    share: tuple[int, int] = (0, 1)

    def count(self, rows: int) -> int:
        return min(rows, self.limit or rows)


@dataclasses.dataclass
class TaskRows:
    """The rows of a task after a run.

    Attributes:
      total: number of questions, at most the limit.
      num_new: number of rows that this run evaluated.
      seconds: duration of this run.
    """

    rows: dict[int, dict]
    total: int
    num_new: int
    seconds: float

    @property
    def right(self) -> int:
        return sum(row["right"] for row in self.rows.values())

    @property
    def credit(self) -> float:
        return sum(map(scores.credit, self.rows.values()))


class Checked(NamedTuple):
    """Result of checking a plan: warnings, and by task the digest of each row's prompt."""

    warnings: list[str]
    prompts: dict[str, list[str]]


def check(model: ModelInfo | BenchmarkModel, plan: Plan, context: int) -> Checked:
    """Checks a plan before weights are read.

    Args:
      context: training length in tokens; longer prompts give a warning.

    Raises:
      UserError: questions that the model cannot answer.
    """
    warnings, digests = [], {}
    for name, questions in plan.questions.items():
        items = questions.items[: plan.count(len(questions.items))]
        if questions.task.kind == LETTERS:
            letters.check(model, items)
            prompts, num_tokens = [letters.prompt(model, item) for item in items], 0
        else:
            if name == "humaneval":
                _check_tests(items, questions.places, plan.answers.helpers)
            elif name == "gsm8k":
                _check_answers(items, questions.places)
            prompts = [generated.prompt(model, item, plan.answers.mode) for item in items]
            num_tokens = plan.answers.num_tokens
        warnings += _check_lengths(model, name, questions.places, prompts, num_tokens, context)
        digests[name] = [letters.prompt_hash(ids) for ids, _ in prompts]
    for name, ruler_set in plan.ruler.items():
        digests[name] = [letters.prompt_hash(ids) for ids in ruler_set.prompts]
    return Checked(warnings, digests)


def _check_tests(items, places, helpers: str) -> None:
    for item, place in zip(items, places, strict=False):  # a limit shortens items
        try:
            test = generated.test(item, helpers)
            sandbox.check(sandbox.Problem("", test, item.entry_point))
        except sandbox.SandboxError as error:
            raise UserError(f"{place}: {error}") from error


def _check_answers(items, places) -> None:
    for item, place in zip(items, places, strict=False):  # a limit shortens items
        if generated.number(item.answer) is None:
            raise UserError(f"{place}: answer = {item.answer[-40:]!r}: must have '#### NUMBER'")


def _check_lengths(model, name, places, prompts, num_tokens: int, context: int) -> list[str]:
    """Raises a UserError for a prompt that does not fit; returns warnings on long prompts.

    Args:
      num_tokens: maximum tokens to generate after a prompt.
    """
    lengths = [len(ids) for ids, _ in prompts]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    needed = lengths[longest] + max(0, num_tokens - 1)  # the last generated token is not an input
    if model.positions is not None and needed > model.positions:
        generation = f" and {num_tokens} to generate" if num_tokens else ""
        raise UserError(
            f"{places[longest]}: {lengths[longest]} tokens{generation}; the model has "
            f"{model.positions} positions: remove {name} from --tasks"
            + (", or lower --num_tokens" if num_tokens else "")
        )
    warnings = []
    if beyond := sum(length + num_tokens > context for length in lengths):
        warnings.append(
            f"{name}: {beyond:,} of {len(lengths):,} prompts may exceed the training length of "
            f"{context:,} tokens"
        )
    if cut := sum(is_cut for _, is_cut in prompts):
        warnings.append(f"{name}: {cut:,} prompts are longer than the limit, and lose their end")
    return warnings


@contextlib.contextmanager
def opened(
    plan: Plan,
    folder: epath.Path,
    *,
    identities: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Any],
    prompts: Mapping[str, Sequence[str]],
) -> Iterator[dict[str, RowStore]]:
    """Opens the saved rows of each task, locked for this process.

    Args:
      folder: holds the checkpoint's evaluations.
      identities, prompts: arguments of `RowStore`, by task.
      defaults: see `RowStore`.

    Raises:
      UserError: saved rows are of another model or other options, or rows cannot be written.
    """
    with contextlib.ExitStack() as stack:
        stores = {}
        for name in names(plan):
            stores[name] = RowStore(
                folder,
                name,
                identities[name],
                plan.share,
                defaults=defaults,
                prompts=prompts.get(name, ()),
            )
            stack.callback(stores[name].close)
        yield stores


def run(model: BenchmarkModel, plan: Plan, stores: Mapping[str, RowStore]) -> dict[str, TaskRows]:
    """Evaluates all missing rows; returns the rows of each task.

    Raises:
      UserError: rows cannot be written.
    """
    results = {}
    for name, questions in plan.questions.items():
        items, task = questions.items, questions.task
        if task.kind == LETTERS:
            block = letters.BLOCK * model.batch
            ask = functools.partial(letters.ask, model, items)
        else:
            block = model.batch
            ask = functools.partial(generated.ask, model, items, options=plan.answers)
        results[name] = _run_task(name, stores[name], plan.count(len(items)), block, ask)
    for task in plan.core:
        name = core_tasks.label_of(task)
        ask = functools.partial(core_tasks.ask, model, task)
        count = plan.count(len(task.items))
        results[name] = _run_task(name, stores[name], count, 2 * model.batch, ask)
    for name, ruler_set in plan.ruler.items():
        ask = functools.partial(ruler.ask, model, ruler_set)
        count = plan.count(len(ruler_set.prompts))
        results[name] = _run_task(name, stores[name], count, model.batch, ask)
    for name, done in results.items():  # other processes may have added rows meanwhile
        stores[name].reload()
        done.rows = stores[name].first(done.total)
    return results


def names(plan: Plan) -> list[str]:
    """Returns the names that rows are saved under: of tasks, CORE's tasks and RULER's sets."""
    return [*plan.questions, *map(core_tasks.label_of, plan.core), *plan.ruler]


def _run_task(name: str, store: RowStore, count: int, block: int, ask) -> TaskRows:
    missing, start_time = store.missing(count), time.monotonic()
    with progress.Steps(count, len(store.first(count)), unit=f"{name}: row") as bar:
        for start in range(0, len(missing), block):
            new = ask(missing[start : start + block])
            store.add(new)
            done = store.first(count)
            credit = sum(map(scores.credit, done.values()))
            bar.step(f"{100 * credit / len(done):.1f} % right", len(new))
    return TaskRows(store.first(count), count, len(missing), time.monotonic() - start_time)
