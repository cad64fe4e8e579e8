"""A command line, its outcome, and the faults of the outcome."""

from collections.abc import Mapping
import dataclasses
import importlib
import importlib.util
import re
import shlex

INSIDE, FORKED, STARTED = "inside", "forked", "started"
CPU_SECONDS = 30.0  # limit; compiling for the scene's model takes 10
GROWTH_BYTES = 1_100_000_000  # limit; importing and measuring take up to 1 GB
LINES = 25  # limit of a message; the longest is a table of reasons

_PROGRESS = re.compile(r"kvjax: .*(\(\d+ s so far\)|: \d+\.\d s)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A command line in a folder of its own, beside `../shared` (see `worker.build`).

    Attributes:
      command: module that `python -m` runs.
      message: words, one of which the message of status 2 must contain; (): any message.
      status: allowed exit statuses.
      prints: text that standard output must contain if the status is 0.
      how: INSIDE a process that runs many cases and skips expensive parts; FORKED from a warm
        process; or STARTED as a new interpreter.
      scene: "plain": a few files; "trained": also a finished run in `run`.
      edits: (path, content) written before the command; None removes, "/" makes a folder.
      stdin, stdout, stderr: "closed" (`>&-`) or "full" (/dev/full); for stdout also "head" (`| head
        -1`) and "shut" (a pipe without a reader); for stdin otherwise its content.
      talks: the command may print more than the message before it ends with 2, as runs do.
      loses: files that may change, because their last line is incomplete.
      interrupt: seconds from the start of imports to SIGINT; None: no signal.
    """

    command: str
    arguments: tuple[str, ...] = ()
    message: tuple[str, ...] = ()
    status: tuple[int, ...] = (0, 2)
    prints: str = ""
    how: str = INSIDE
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scene: str = "plain"
    edits: tuple[tuple[str, str | None], ...] = ()
    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    talks: bool = False
    loses: tuple[str, ...] = ()
    interrupt: float | None = None

    def line(self) -> str:
        """Returns the shell command that repeats the case, in a folder beside `shared`."""
        redirections = {
            ("stdin", "closed"): "<&-",
            ("stdout", "closed"): ">&-",
            ("stdout", "full"): ">/dev/full",
            ("stdout", "head"): "| head -1",
            ("stdout", "shut"): "| true",
            ("stderr", "closed"): "2>&-",
            ("stderr", "full"): "2>/dev/full",
        }
        words = [f"{k}={_quoted(v)}" for k, v in self.environment.items()]
        words += ["python -m", self.command, *map(_quoted, self.arguments)]
        words += [
            redirections.get((s, getattr(self, s)), "") for s in ("stdin", "stdout", "stderr")
        ]
        notes = [f"scene {self.scene}"] if self.scene != "plain" else []
        notes += [
            f"{path} is {'gone' if text is None else text[:40]!r}" for path, text in self.edits
        ]
        notes += [f"Ctrl-C after {self.interrupt} s"] if self.interrupt is not None else []
        return " ".join(filter(None, words)) + (f"    # {', '.join(notes)}" if notes else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a case; `lost`: files whose content is gone."""

    status: int
    stdout: str
    stderr: str
    seconds: float  # of CPU
    grown: int  # bytes of resident memory at the peak, minus those before
    lost: tuple[str, ...]


def faults(case: Case, outcome: Outcome) -> list[str]:
    """Returns the faults of an outcome."""
    faults_ = []
    if outcome.status not in case.status:
        faults_.append(f"status {outcome.status}, not {' or '.join(map(str, case.status))}")
    if "Traceback" in outcome.stderr + outcome.stdout:
        faults_.append("a traceback")
    if outcome.status == 0 and case.prints not in outcome.stdout:
        faults_.append(f"{case.prints!r} is not in its output")
    if outcome.status == 2:
        faults_ += _message_faults(case, outcome)
    if lost := sorted(set(outcome.lost) - set(case.loses)):
        faults_.append(f"lost: {', '.join(lost)}")
    if outcome.seconds > CPU_SECONDS:
        faults_.append(f"{outcome.seconds:.1f} s of CPU")
    if outcome.grown > GROWTH_BYTES:
        faults_.append(f"{outcome.grown / 1e9:.1f} GB more memory")
    return faults_


def _message_faults(case: Case, outcome: Outcome) -> list[str]:
    faults_ = []
    if outcome.stdout and not case.talks:
        faults_.append("standard output beside a message")
    if case.stderr:
        return faults_  # nobody reads it
    lines = [line for line in outcome.stderr.splitlines() if not _PROGRESS.fullmatch(line)]
    messages = [line for line in lines if line.startswith("kvjax: ")]
    if len(messages) != 1:
        faults_.append(f"{len(messages)} messages")
    elif lines[0] != messages[0] and not case.talks:
        faults_.append("something above the message")
    elif not (lines[-1] == messages[0] or lines[lines.index(messages[0]) + 1].startswith("  ")):
        faults_.append("something below the message")
    if len(lines) > LINES:
        faults_.append(f"{len(lines)} lines")
    if case.message and not any(word in outcome.stderr for word in case.message):
        faults_.append(f"does not name {' or '.join(dict.fromkeys(case.message))}")
    return faults_


def report(case: Case, outcome: Outcome, faults_: list[str]) -> str:
    """Returns the command line, its faults and its output as text."""
    streams = [f"  {name}: {text[-1500:].rstrip()!r}" for name, text in _streams(outcome) if text]
    text = "\n".join([case.line()[:2000], f"  {'; '.join(faults_)}", *streams])
    return text.replace("x" * 1000, "$(printf 'x%.0s' {1..1000})")


def _streams(outcome: Outcome) -> list[tuple[str, str]]:
    return [("stdout", outcome.stdout), ("stderr", outcome.stderr)]


def _quoted(word: str) -> str:
    """Quotes a word for bash, as $'...' if it is not valid UTF-8."""
    try:
        word.encode()
        return shlex.quote(word)
    except UnicodeEncodeError:
        as_bytes = word.encode(
            "utf-8", "surrogateescape" if _is_from_bytes(word) else "surrogatepass"
        )
        text = as_bytes.decode("latin-1")
        text = "".join(c if c.isascii() and c not in "'\\" else f"\\x{ord(c):02x}" for c in text)
        return f"$'{text}'"


def _is_from_bytes(word: str) -> bool:
    """Returns True if Python decodes bytes of a command line to this text."""
    return not any("\ud800" <= c < "\udc80" or "\udcff" < c <= "\udfff" for c in word)


def main_of(command: str):
    """Returns the function that `python -m` of a module or package runs."""
    is_package = importlib.util.find_spec(command).submodule_search_locations is not None
    return importlib.import_module(f"{command}.__main__" if is_package else command).main
