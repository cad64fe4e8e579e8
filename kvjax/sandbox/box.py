"""A box: judges programs behind layers of protection, within limits."""

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

_CPU_SHARE = 0.9  # a timeout with more CPU time than this share is not due to a busy machine


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of judging a program."""

    passed: bool  # `check` returned
    reason: str  # why it failed; "" if it passed
    seconds: float  # from the start of the interpreters to the verdict
    retried: bool  # True if it was judged again after a timeout


class Box:
    """Judges programs behind layers that are verified to hold.

    Args:
      layers: the requested layers.
      limits: limits of each judgement.
      without: layers that this machine lacks, with the reason.

    Attributes:
      layers: names of the layers that hold, as results list them.

    Raises:
      SandboxError: no interpreter starts behind them, or a requested layer does not hold.
    """

    def __init__(self, layers: Layers, limits: Limits = Limits(), without: tuple[str, ...] = ()):
        self._requested, self.limits, self.without = layers, limits, without
        self._running, self._lock = set(), threading.Lock()
        self._held = None
        with self._pair():
            pass
        self.layers = layers.names(self._held)

    def judge(self, *, program: str, test: str, entry_point: str) -> Verdict:
        """Judges a program: it passes if `check(entry_point)` of the test returns.

        Raises:
          SandboxError: the test is invalid, or no interpreter starts any more.
        """
        return self._judge(Problem(program, test, entry_point))

    def judge_all(
        self,
        problems: Iterable[Problem],
        workers: int = 0,
        on_verdict: Callable[[int, Verdict], None] | None = None,
    ) -> list[Verdict]:
        """Returns verdicts in the order of the problems, for any number of workers.

        Args:
          workers: problems judged at once; 0: one per core.
          on_verdict: called with a problem's index and its verdict, in any order.

        Raises:
          SandboxError: see `judge`; for an invalid test before anything runs.
        """
        problems = list(problems)
        for problem in problems:
            problem_lib.called_names(problem)
        with futures.ThreadPoolExecutor(workers or _cores()) as pool:
            index = {pool.submit(self._judge, problem): i for i, problem in enumerate(problems)}
            try:
                for future in futures.as_completed(index):
                    if on_verdict:
                        on_verdict(index[future], future.result())
                return [future.result() for future in index]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._kill()
                raise

    def with_limits(self, limits: Limits) -> "Box":
        """Returns a box of the same layers with other limits."""
        return Box(self._requested, limits, self.without)

    def _judge(self, problem: Problem) -> Verdict:
        names, start = problem_lib.called_names(problem), time.perf_counter()
        reason, retries = problem_lib.invalid_program(problem.program), 0
        if reason is None:
            reason, retry = self._run(problem, names)
            while retry and retries < self.limits.retries:
                retries += 1
                reason, retry = self._run(problem, names)
        return Verdict(not reason, reason, time.perf_counter() - start, retried=retries > 0)

    def _run(self, problem: Problem, names: list[str]) -> tuple[str, bool]:
        """Returns a program's failure, empty if it passed; and True if it should be retried."""
        try:
            with self._pair() as pair:
                reply = self._verdict(*pair, problem, names)
        except TimedOutError as error:
            cpu_seconds = sum(process.cpu_seconds for process in pair)
            retry = cpu_seconds < _CPU_SHARE * self.limits.seconds
            return f"{error} after {self.limits.seconds:g} s", retry
        except Failure as failure:
            return str(failure), False
        outcome, _, text = reply.partition(" ")
        if outcome == "broken":
            raise SandboxError(
                f"test of {problem.entry_point} never calls the program: {readable(text)}"
            )
        return "" if outcome == "passed" else readable(text) or "the judge failed", False

    def _verdict(
        self, candidate: Process, judge: Process, problem: Problem, names: list[str]
    ) -> str:
        """Passes calls between judge and candidate; returns the judge's last line."""
        deadline = time.monotonic() + self.limits.seconds
        outcome, _, text = candidate.ask(json.dumps(problem.program), deadline).partition(" ")
        if outcome != "value":
            return f"failed the program raised {readable(text)}"
        task = dict(test=problem.test, entry_point=problem.entry_point, names=names)
        reply = judge.ask(json.dumps(task), deadline)
        while reply.startswith("call "):
            reply = judge.ask(candidate.ask(reply.removeprefix("call "), deadline), deadline)
        return reply

    @contextlib.contextmanager
    def _pair(self) -> Iterator[tuple[Process, Process]]:
        """Yields two locked interpreters, started together: candidate and judge."""
        deadline = time.monotonic() + self.limits.start_seconds
        command, pair = self._requested.command(self.limits), []
        try:
            try:
                for role in ("candidate", "judge"):
                    pair.append(Process(command, ENVIRONMENT, role, self.limits.output_bytes))
                    with self._lock:
                        self._running.add(pair[-1])
                    pair[-1].send(json.dumps(self._requested.request(role, self.limits)), deadline)
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
        """Raises a SandboxError unless all requested layers hold, the same in all interpreters."""
        for name in self._requested.kernel_layers():
            if held.get(name, 0) <= 0:
                raise SandboxError(f"{name}: {missing(held, name)}")
        if self._held is None:
            self._held = held
        if held != self._held:
            raise SandboxError(f"the layers that hold have changed: {held}, not {self._held}")

    def _kill(self) -> None:
        """Kills all running interpreters."""
        with self._lock:
            for process in self._running:
                process.kill()


def missing(held: dict[str, int], name: str) -> str:
    """Returns the kernel's error for a layer, as text."""
    number = -held.get(name, -errno.ENOSYS)
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
