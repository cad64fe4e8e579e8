"""Starts a locked interpreter, exchanges lines with it, and kills it.

The only part of its output that this process interprets is a random number at the start of a line.
"""

from collections.abc import Mapping, Sequence
import os
import secrets
import select
import signal
import subprocess
import tempfile
import time

OUT_OF_TIME = "out of time"
_EXIT_SECONDS = 2.0  # time limit for an interpreter to exit after it has closed its pipes


class Failure(Exception):
    """The interpreter broke the protocol; the text says how."""


class TimedOutError(Failure):
    """No reply before the deadline."""


class Process:
    """An interpreter with two pipes, and a session and an empty folder of its own.

    Args:
      command: program and arguments.
      environment: its whole environment.
      name: its name in messages.
      max_bytes: maximum total of its replies.

    Attributes:
      cpu_seconds: its CPU time, known after `end`; 0 if unknown.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], name: str, max_bytes: int
    ):
        self._name, self._max_bytes, self._bytes_left = name, max_bytes, max_bytes
        self._number = b""
        self.cpu_seconds = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="kvjax-")
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                cwd=self._folder.name,
                env=dict(environment),
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError:
            self._folder.cleanup()
            raise
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def ask(self, text: str, deadline: float) -> str:
        """Sends a line of ASCII and returns the reply, both without the newline.

        Raises:
          Failure: an invalid reply, or output before the request.
        """
        self.send(text, deadline)
        return self.receive(deadline)

    def send(self, text: str, deadline: float) -> None:
        """Sends a request, prefixed by a new random number."""
        if self._wait(self._out, select.POLLIN, deadline=None):
            if os.read(self._out, 1):
                raise Failure(f"the {self._name} wrote before a request")
            raise Failure(self._ended())
        self._number = secrets.token_hex(16).encode()
        unsent = memoryview(self._number + b" " + text.encode("ascii") + b"\n")
        while unsent:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                unsent = unsent[os.write(self._in, unsent) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise Failure(self._ended()) from None

    def receive(self, deadline: float) -> str:
        """Returns the reply, which must repeat the request's random number."""
        line = bytearray()
        while not line.endswith(b"\n"):
            self._wait(self._out, select.POLLIN, deadline)
            chunk = os.read(self._out, 1 << 16)
            if not chunk:
                raise Failure(self._ended(bytes(line)))
            self._bytes_left -= len(chunk)
            if self._bytes_left < 0:
                raise Failure(f"the {self._name} wrote more than {self._max_bytes:,} bytes")
            if b"\n" in chunk[:-1]:
                output = readable(bytes(line + chunk))
                raise Failure(f"the {self._name} wrote more than its reply: {output}")
            line += chunk
        number, _, text = bytes(line[:-1]).partition(b" ")
        if not secrets.compare_digest(number, self._number) or not text.isascii():
            output = readable(bytes(line))
            raise Failure(f"the {self._name} wrote a reply to no request: {output}")
        return text.decode("ascii")

    def kill(self) -> None:
        """Kills it; a thread that waits for it gets a Failure."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS: EPERM if it has exited
            pass

    def end(self) -> None:
        """Kills it and removes its folder."""
        if self._process.returncode is None:
            self.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self.cpu_seconds = self._reap()
        self._folder.cleanup()

    def _reap(self) -> float:
        if self._process.returncode is not None:
            return 0.0
        try:
            _, status, usage = os.wait4(self._process.pid, 0)
        except ChildProcessError:  # SIGCHLD is ignored, so the kernel has reaped it
            self._process.returncode = 0
            return 0.0
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_utime + usage.ru_stime

    def _wait(self, descriptor: int, event: int, deadline: float | None) -> bool:
        """Returns True if there is an event; raises a TimedOutError at a deadline."""
        poll = select.poll()
        poll.register(descriptor, event)
        if deadline is None:
            return bool(poll.poll(0))
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimedOutError(OUT_OF_TIME)
        return True

    def _ended(self, output: bytes = b"") -> str:
        """Returns how the interpreter ended, for a message."""
        try:
            status = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the {self._name} closed its pipes"
        if status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):  # the latter from bubblewrap
            return f"the {self._name} used up its CPU time"
        kind = f"signal {-status}" if status < 0 else f"status {status}"
        text = readable(output)
        return f"the {self._name} ended with {kind}" + (f": {text}" if text else "")


def run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess:
    """Runs a trusted command; returns status 1 if it cannot be started or times out."""
    options = dict(env={}, capture_output=True, text=True, errors="replace", check=False)
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=seconds, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def readable(output: bytes | str) -> str:
    """Returns an interpreter's output for a message: printable characters, at most 300."""
    text = output if isinstance(output, str) else output[:10000].decode("ascii", "replace")
    return "".join(c for c in text if c.isprintable()).strip(' "')[:300]
