"""The protocol with a locked interpreter: one line per request."""

import os
import sys
import time

import pytest

from kvjax.sandbox import process as process_lib
from kvjax.sandbox.process import Failure, Process, TimedOutError

READ = "import os, sys, time; number = sys.stdin.buffer.readline().split()[0].decode()\n"


@pytest.fixture
def started():
    """Returns a function that starts a process with Python code."""
    running = []

    def start(code, max_bytes=1000):
        command = [sys.executable, "-I", "-S", "-c", code]
        running.append(Process(command, {}, "program", max_bytes))
        return running[-1]

    yield start
    for process in running:
        process.end()


def soon():
    return time.monotonic() + 20


def test_a_reply_to_the_request(started):
    process = started(READ + "print(number, 'fine', flush=True); time.sleep(99)")
    assert process.ask("hello", soon()) == "fine"


ENDED = "^the program ended with "
REPLIES = [
    ("print('0 fine')", "a reply to no request: 0 fine$"),
    ("print(number[:-1], 'fine')", "a reply to no request"),
    ("print('x' + number[1:], 'fine')", "a reply to no request"),
    ("print()", "a reply to no request"),
    ("os.write(1, number.encode() + b' \\xff\\n')", "a reply to no request"),
    (
        "os.write(1, (number + ' a\\n' + number + ' b\\n').encode())",
        "more than its reply: .* a.* b",
    ),
    ("os.write(1, b'x' * 1001)", "^the program wrote more than 1,000 bytes$"),
    ("print(number, 'fine', end='')", ENDED + "status 0: .* fine$"),
    ("sys.exit(3)", ENDED + "status 3$"),
    ("sys.exit(128 + 9)", ENDED + "status 137$"),
    ("os.kill(os.getpid(), 9)", ENDED + "signal 9$"),
    ("os.kill(os.getpid(), 24)", "^the program used up its CPU time$"),  # SIGXCPU
    ("sys.exit(128 + 24)", "^the program used up its CPU time$"),
    ("raise ValueError", "wrote .*: Traceback"),
    ("os.close(1); os.close(2); time.sleep(99)", "^the program closed its pipes$"),
]


def test_another_reply_is_a_failure(started, monkeypatch):
    monkeypatch.setattr(process_lib, "_EXIT_SECONDS", 0.5)
    running = [started(READ + code) for code, _ in REPLIES]
    for process in running:
        process.send("hello", soon())
    for process, (code, message) in zip(running, REPLIES, strict=True):
        with pytest.raises(Failure, match=message):
            pytest.fail(f"{code}: {process.receive(soon())}")
    assert issubclass(TimedOutError, Failure)
    deaf = started("import os, time; os.close(0); time.sleep(99)")
    time.sleep(0.3)
    with pytest.raises(Failure, match="^the program closed its pipes$"):
        deaf.send("x" * 10**6, soon())


def test_what_is_shown_is_short_and_without_control_characters():
    for said, shown in (
        (b'\x1b[1m "a\nb\xff" ', '[1m "ab\ufffd'),
        ("\u00e9\x07", "\u00e9"),
        ("x" * 301, "x" * 300),
        (b"\n" * 9_999 + b"ab", "a"),
    ):
        assert process_lib.readable(said) == shown


def test_a_reply_before_its_request_is_a_failure(started):
    process = started("print('0 fine', flush=True)\n" + READ)
    time.sleep(0.5)
    with pytest.raises(Failure, match="wrote before a request"):
        process.ask("hello", soon())


def test_a_second_reply_is_a_failure_of_the_next_request(started):
    twice = "for _ in range(2): print(number, 'fine', flush=True); time.sleep(0.3)\n"
    process = started(READ + twice + READ + "print(number, 'fine', flush=True)")
    assert process.ask("hello", soon()) == "fine"
    with pytest.raises(Failure):
        process.ask("hello", soon())


def test_bytes_are_counted_over_all_replies(started):
    process = started((READ + "print(number, 'x' * 400, flush=True)\n") * 3)
    process.ask("hello", soon()), process.ask("hello", soon())
    with pytest.raises(Failure, match="more than 1,000 bytes"):
        process.ask("hello", soon())


@pytest.mark.parametrize("text", ["hello", "x" * 10**6], ids=["waiting", "writing"])
def test_a_process_that_does_nothing(started, text):
    process = started("import time; time.sleep(99)")
    with pytest.raises(TimedOutError):
        process.ask(text, time.monotonic() + 0.2)


def test_a_process_that_is_gone(started):
    process = started("")
    time.sleep(0.3)
    with pytest.raises(Failure, match="ended with status 0"):
        process.ask("hello", soon())


def test_it_has_nothing_of_this_process(started, monkeypatch):
    monkeypatch.setenv("KVJAX_SECRET", "secret")
    one, other = os.pipe()
    os.set_inheritable(one, True)
    code = """
import json
def there(i):
    try: os.fstat(i)
    except OSError: return False
    return True
found = [os.listdir('.'), list(map(there, range(3, 64))), dict(os.environ), os.getsid(0)]
print(number, json.dumps(found), flush=True)
"""
    try:
        said = started(READ + code, 10000).ask("hello", soon())
    finally:
        os.close(one), os.close(other)
    assert said.startswith("[[], [" + "false, " * 60 + "false], {")
    assert "SECRET" not in said and not said.endswith(f" {os.getsid(0)}]")


def test_its_folder_goes_with_it(started):
    code = "open('file', 'w').close(); print(number, os.getcwd(), flush=True); time.sleep(99)"
    process = started(READ + code)
    folder = process.ask("hello", soon())
    assert os.path.isdir(folder)
    process.end()
    assert not os.path.exists(folder) and 0 < process.cpu_seconds < 20
    with pytest.raises(OSError):
        Process(["/no/python"], {}, "program", 1)
    # Where children are ignored, another has waited for it.
    gone = started("")
    assert gone.cpu_seconds == 0
    os.waitpid(gone._process.pid, 0)
    gone.end()
    assert (gone.cpu_seconds, gone._process.returncode) == (0, 0)


def test_a_trusted_command_that_takes_too_long_fails():
    found = process_lib.run([sys.executable, "-c", "import time; time.sleep(99)"], 0.1)
    assert found.returncode == 1 and "timed out after 0.1 seconds" in found.stderr
