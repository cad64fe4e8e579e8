"""Runs groups of cases and prints those with faults.

python -m tests.fuzz "options of kvjax.main" files     # all groups where none is named
"""

import pathlib
import sys
import tempfile
import time

from tests.fuzz.cases import GROUPS, cases_of
from tests.fuzz.runner import Worker

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home, Worker(pathlib.Path(home)) as worker:
        for group in sys.argv[1:] or GROUPS:
            begun, cases = time.monotonic(), cases_of(group)
            failures = worker.failures(cases)
            for text in failures:
                print(text, flush=True)
            seconds = time.monotonic() - begun
            print(f"{group}: {len(failures)} of {len(cases)} cases, {seconds:.0f} s\n", flush=True)
