"""A box: layers and limits, in which programs are judged."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import contextlib
import dataclasses
import errno
import json
import os
import threading
import time

from kvjax.sandbox import problem as problem_lib
from kvjax.sandbox.errors import SandboxError
from kvjax.sandbox.layers import ENVIRONMENT, Layers
from kvjax.sandbox.limits import Limits
from kvjax.sandbox.problem import Problem
from kvjax.sandbox.process import Failure, Process, TimedOutError, readable

_OF_A_CORE = 0.9  # of the time: what had as much is not slow because of others


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a program.

    Attributes:
      passed: `check` returned.
      reason: why it has not; empty if it has.
      seconds: from the start of the interpreters to the verdict.
      retried: it was out of time once, and this is what came of the second time.
    """

    passed: bool
    reason: str
    seconds: float
    retried: bool


class Box:
    """Judges programs behind layers that hold.

    Args:
      layers: what is asked for.
      limits: of each judgement.
      without: layers that this machine does not have, and why.

    Attributes:
      layers: the names of those that hold, for results.

    Raises:
      SandboxError: no interpreter starts behind them, or one that is asked for does not hold.
    """

    def __init__(self, layers: Layers, limits: Limits = Limits(), without: tuple[str, ...] = ()):
        self._asked, self.limits, self.without = layers, limits, without
        self._running, self._lock = set(), threading.Lock()
        self._held = None
        with self._pair():
            pass
        self.layers = layers.names(self._held)

    def judge(self, *, program: str, test: str, entry_point: str) -> Verdict:
        """Whether `check(entry_point)` of the test returns for the program.

        Raises:
          SandboxError: the test is none, whatever the program; or no interpreter starts any more.
        """
        return self._judge(Problem(program, test, entry_point))

    def judge_all(
        self,
        problems: Iterable[Problem],
        workers: int = 0,
        on_verdict: Callable[[int, Verdict], None] | None = None,
    ) -> list[Verdict]:
        """Verdicts in the order of the problems, whatever the number of workers.

        Args:
          workers: judged at the same time; 0: as many as this process has cores.
          on_verdict: called with the index of a problem when its verdict is there, in any order.

        Raises:
          SandboxError: see `judge`; before anything is run if a test is none.
        """
        problems = list(problems)
        for problem in problems:
            problem_lib.asked_names(problem)
        with futures.ThreadPoolExecutor(workers or _cores()) as pool:
            at = {pool.submit(self._judge, problem): i for i, problem in enumerate(problems)}
            try:
                for done in futures.as_completed(at):
                    if on_verdict:
                        on_verdict(at[done], done.result())
                return [future.result() for future in at]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._kill()
                raise

    def with_limits(self, limits: Limits) -> "Box":
        """The same layers with other limits."""
        return Box(self._asked, limits, self.without)

    def _judge(self, problem: Problem) -> Verdict:
        names, start = problem_lib.asked_names(problem), time.perf_counter()
        reason, retries = problem_lib.why_not_a_program(problem.program), 0
        if reason is None:
            reason, again = self._run(problem, names)
            while again and retries < self.limits.retries:
                retries += 1
                reason, again = self._run(problem, names)
        return Verdict(not reason, reason, time.perf_counter() - start, retried=retries > 0)

    def _run(self, problem: Problem, names: list[str]) -> tuple[str, bool]:
        """Why a program failed, empty if it passed; whether the machine was too busy to tell."""
        try:
            with self._pair() as pair:
                said = self._verdict(*pair, problem, names)
        except TimedOutError as error:
            used = sum(process.cpu_seconds for process in pair)
            again = used < _OF_A_CORE * self.limits.seconds
            return f"{error} after {self.limits.seconds:g} s", again
        except Failure as failure:
            return str(failure), False
        outcome, _, text = said.partition(" ")
        if outcome == "broken":
            raise SandboxError(f"test of {problem.entry_point} asks nothing: {readable(text)}")
        return "" if outcome == "passed" else readable(text) or "the judge failed", False

    def _verdict(
        self, candidate: Process, judge: Process, problem: Problem, names: list[str]
    ) -> str:
        """The last that the judge says; raises a Failure of either."""
        deadline = time.monotonic() + self.limits.seconds
        outcome, _, text = candidate.ask(json.dumps(problem.program), deadline).partition(" ")
        if outcome != "value":
            return f"failed the program raised {readable(text)}"
        task = dict(test=problem.test, entry_point=problem.entry_point, names=names)
        said = judge.ask(json.dumps(task), deadline)
        while said.startswith("call "):
            said = judge.ask(candidate.ask(said.removeprefix("call "), deadline), deadline)
        return said

    @contextlib.contextmanager
    def _pair(self) -> Iterator[tuple[Process, Process]]:
        """A candidate and a judge, started at the same time and locked."""
        deadline = time.monotonic() + self.limits.start_seconds
        command, pair = self._asked.command(self.limits), []
        try:
            try:
                for role in ("candidate", "judge"):
                    pair.append(Process(command, ENVIRONMENT, role, self.limits.output_bytes))
                    with self._lock:
                        self._running.add(pair[-1])
                    pair[-1].send(json.dumps(self._asked.request(role, self.limits)), deadline)
                for process in pair:
                    self._check(json.loads(process.receive(deadline)))
            except (Failure, OSError) as failure:
                raise SandboxError(f"no interpreter starts: {failure}") from failure
            yield tuple(pair)
        finally:
            with self._lock:
                self._running.difference_update(pair)
            for process in pair:
                process.end()

    def _check(self, held: dict[str, int]) -> None:
        """Raises a SandboxError unless all holds that was asked for, as it did at first."""
        for name in self._asked.of_the_kernel():
            if held.get(name, 0) <= 0:
                raise SandboxError(f"{name}: {missing(held, name)}")
        if self._held is None:
            self._held = held
        if held != self._held:
            raise SandboxError(f"layers hold no longer as they did: {held}, not {self._held}")

    def _kill(self) -> None:
        """Ends what is judged at the moment."""
        with self._lock:
            for process in self._running:
                process.kill()


def missing(held: dict[str, int], name: str) -> str:
    """What the kernel said of a layer."""
    number = -held.get(name, -errno.ENOSYS)
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
