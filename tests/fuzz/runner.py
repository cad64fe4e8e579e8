"""Runs cases in a worker and reports their faults."""

from collections.abc import Iterable
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

from kvjax.foundation.checkout import ROOT
from tests import quick
from tests.fuzz.case import Case, Outcome, faults, report


class Worker:
    """A warm process in a folder; a context manager."""

    def __init__(self, home: pathlib.Path):
        environment = os.environ | dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
        environment |= dict(TF_CPP_MIN_LOG_LEVEL="2", COLUMNS="80", KVJAX_CACHE=str(home / "cache"))
        environment |= dict(XLA_FLAGS=quick.XLA_FLAGS)
        cache = quick.compilation_cache()  # shared with other tests
        environment |= {key.upper(): str(value) for key, value in cache.items()}
        self._noise = home / "noise.txt"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(home)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: Case) -> Outcome:
        print(json.dumps(dataclasses.asdict(case)), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker died:\n{self._noise.read_text()[-5000:]}")
        fields = json.loads(line)
        return Outcome(**fields | dict(lost=tuple(fields["lost"])))

    def failures(self, cases: Iterable[Case]) -> list[str]:
        """Runs the cases; returns a report of each that has faults."""
        reports = []
        for case in cases:
            outcome = self.run(case)
            if case_faults := faults(case, outcome):
                reports.append(report(case, outcome, case_faults))
        return reports

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error) -> None:
        self._process.stdin.close()
        self._process.wait()
