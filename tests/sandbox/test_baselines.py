"""What deciding in the candidate's own interpreter would take: the forgeries are real.

Two ways that are common elsewhere: the program, its test and the call of `check` run as one file,
and the exit status says whether they passed; or they run by `exec` in a process that then says so.
"""

import subprocess
import sys

import pytest

from tests.sandbox import attacks
from tests.sandbox.test_box import TEST

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
# As the expected value of the first call: there is but one.
ONCE = "def check(candidate):\n    assert candidate(1, 2) == 3\n"


def by_status(program, test=TEST):
    """Returns True if a file exits with status 0."""
    code = f"{program}\n{test}\ncheck(add)\n"
    return subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def by_word(program, test=TEST):
    """Returns True if a process reports no exception."""
    code = f"{program}\n{test}\ncheck(add)\n"
    runner = f"try:\n    exec({code!r}, {{}})\n    print('passed')\nexcept BaseException: pass"
    run = subprocess.run([sys.executable, "-I", "-c", runner], capture_output=True, check=False)
    return run.stdout == b"passed\n"


@pytest.mark.parametrize("judge", [by_status, by_word])
def test_they_do_judge(judge):
    assert judge(RIGHT) and not judge(WRONG)


@pytest.mark.parametrize(
    "name, status, word",
    [
        ("leave", True, False),
        ("leave at once", True, False),
        ("leave in the call", True, False),
        ("leave in the call at once", True, False),
        ("equal to everything", True, True),
        ("reads the expected value from its caller", True, True),
    ],
)
def test_forgeries_that_pass_in_one_interpreter(name, status, word):
    program = attacks.FORGERIES[name]
    assert (by_status(program, ONCE), by_word(program, ONCE)) == (status, word)
