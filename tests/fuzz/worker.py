"""A warm process that runs command lines: imports are paid once.

    python -m tests.fuzz.worker FOLDER    # reads a case per line of JSON, answers with an outcome

The worker itself computes nothing, so that it can fork: one child runs all INSIDE cases, one after
another, without expensive parts; each FORKED case runs in its own child, and each STARTED case in a
new interpreter.
"""

import contextlib
import dataclasses
import importlib
import importlib.machinery
import io
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import types
import typing
from unittest import mock

from tests.fuzz.case import FORKED, INSIDE, STARTED, Case, Outcome, main_of

STUCK_SECONDS = 100  # wall-clock limit, for a busy machine
MODULES = (
    "kvjax.__main__",
    "kvjax.main",
    "kvjax.training.loop",
    "kvjax.config_help",
    "kvjax.generate",
    "kvjax.convert.__main__",
    "kvjax.convert.export",
    "kvjax.analysis.__main__",
    "kvjax.evaluate.__main__",
    "kvjax.compare.__main__",
    "kvjax.sweep.__main__",
    "kvjax.chat.__main__",
    "kvjax.lm_eval.__main__",
    "kvjax.lm_eval.options",
    "kvjax.costs.__main__",
    "kvjax.aot",
    "kvjax.data.prepare",
    "kvjax.data.packed_rows",
    "kvjax.kernels.profile",
)
RUN_KEYS = dict(tokenizer="byte", vocab_size=257, sequence_length=32, directory="../shared/data")
COMPILERS = ("libtpu", "jax_cuda13_plugin")  # they need not be installed
IMPORTING = "numpy"  # if it is in a process's memory map, kvjax/__init__.py has run


class Stuck(BaseException):
    """A case that takes too long."""


class Enough(SystemExit):
    """Ends a case that has passed all checks and would now compile."""

    def __init__(self, action: str):
        print(f"would {action}")
        super().__init__(0)


def main(home: pathlib.Path) -> None:
    """Answers the lines of standard input."""
    home.mkdir(parents=True, exist_ok=True)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    noise = os.open(home / "noise.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((null, noise, noise)):
        os.dup2(file, number)
    for module in MODULES:
        importlib.import_module(module)
    runner = _Runner(home)
    runner.build()
    for line in requests:
        fields = json.loads(line)
        tuples = dict(
            loses=tuple,
            arguments=tuple,
            message=tuple,
            status=tuple,
            edits=lambda e: tuple(map(tuple, e)),
        )
        case = Case(**{k: tuples.get(k, lambda v: v)(v) for k, v in fields.items()})
        print(json.dumps(dataclasses.asdict(runner.run(case))), file=answers, flush=True)


class _Runner:
    """Runs each case in `home/case`; `home/shared` has the files that all cases read."""

    def __init__(self, home: pathlib.Path):
        self._shared, self._folder = home / "shared", home / "case"
        self._inside_process: _InsideProcess | None = None
        self._in_shared: dict[str, bytes] = {}

    def build(self) -> None:
        """Makes `shared`, in a child."""
        if self._shared.exists():
            return
        if child := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                raise RuntimeError(f"the files of all cases: status {status}, see noise.txt")
            return
        with _exit_like_python():
            build(self._shared)

    def run(self, case: Case) -> Outcome:
        set_scene(case, self._folder, self._shared)
        neighbours = {root: set(root.iterdir()) for root in (self._shared, self._shared.parent)}
        before = {self._folder: _contents(self._folder)}
        before[self._shared] = self._in_shared or _contents(self._shared)
        if case.how == INSIDE:
            outcome = self._inside(case)
        else:
            outcome = _run_in_own_process(case, self._folder)
        after = {root: _contents(root) for root in before}
        lost = tuple(
            f"{root.name}/{name}"
            for root, files in before.items()
            for name in _lost(files, after[root], moved=outcome.status != 2 or case.talks)
        )
        original = {path.name for path in neighbours[self._shared]}
        self._in_shared = {k: v for k, v in after[self._shared].items() if _top(k) in original}
        for root, existing in neighbours.items():  # removes the case's files
            for path in set(root.iterdir()) - existing:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return dataclasses.replace(outcome, lost=lost)

    def _inside(self, case: Case) -> Outcome:
        if self._inside_process is None:
            self._inside_process = _InsideProcess()
        outcome = self._inside_process.run(case, self._folder)
        if outcome is None:
            outcome = _outcome(self._inside_process.end(), stderr="the process died, see noise.txt")
            self._inside_process = None
        return outcome


def build(shared: pathlib.Path) -> None:
    """Writes a text, prepared data, a run of two steps, and malformed files."""
    from etils import epath

    from kvjax.training import loop
    from tests import runs

    shared.mkdir()
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshr", k=rng.randint(2, 7))) for _ in range(50)]
    text = "\n".join(" ".join(rng.choices(words, k=8)) for _ in range(300))
    (shared / "text.txt").write_text(text + "\n")
    os.chdir(shared)
    config = runs.small_config("text.txt", "data", num_steps=2, sample_tokens=0, eval_rows=8)
    config.data.update(RUN_KEYS)
    config.data.update(source="../shared/text.txt")
    config.train.update(batch_size=2, checkpoint_every=1)
    loop.train(config, epath.Path("trained"))
    from tests.conversation import workdirs

    workdirs.write(shared / "talking")
    (shared / "questions").mkdir()
    row = dict(question="Which?", choices=["this", "that"], answer=1)
    (shared / "questions" / "mmlu.jsonl").write_text((json.dumps(row) + "\n") * 3)
    (shared / "rows").mkdir()
    manifest = dict(tokenizer=dict(vocab_size=8192), splits=dict(train=dict(rows=10**6)))
    manifest |= dict(config=dict(source="a", sequence_length=1024), xz_bits_per_byte=2.0)
    (shared / "rows" / "dataset.json").write_text(json.dumps(manifest))
    (shared / "a_file").write_text("text\n")
    os.mkfifo(shared / "pipe")
    (shared / "binary.py").write_bytes(bytes(range(256)))
    (shared / "empty.txt").write_text("")
    (shared / "marked.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (shared / "latin.txt").write_bytes("caf\xe9".encode("latin-1") * 100)
    (shared / "deep.jsonl").write_text('{"text":' * 100_000 + "\n")
    for name, code in dict(
        raises="raise ValueError('what')",
        ends="import sys; sys.exit(0)",
        wrong="def get_config(:",
        none="a = 1",
        a_dict="def get_config(): return {}",
        keyless="from ml_collections import ConfigDict as get_config",
        late="def get_config(): return {}['x']",
        prompts="def get_config(): return input()",
    ).items():
        (shared / f"{name}.py").write_text(code + "\n")


def set_scene(case: Case, folder: pathlib.Path, shared: pathlib.Path) -> None:
    """Writes the folder in which a case starts."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "kept.txt").write_text("mine too\n")
    if case.scene == "trained":
        shutil.copytree(shared / "trained", folder / "run")
    for name, content in case.edits:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None or content == "/":
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if content:
                path.mkdir()
        else:
            if path.is_dir():
                shutil.rmtree(path)
            path.write_bytes(content.encode("latin-1"))


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns contents by path (size and time for large files); skips locks, plots and data."""
    contents = {}
    for path in folder.rglob("*"):
        skipped = path.name in (".lock", "curves.png") or "/data/" in str(path)
        if path.is_file() and not skipped:
            stat = path.stat()
            small = stat.st_size < 10_000
            content = path.read_bytes() if small else repr(stat[6:9:2]).encode()
            contents[str(path.relative_to(folder))] = content
    return contents


def _top(path: str) -> str:
    """Returns the folder of `shared` that a path is in, or the path itself."""
    return path.partition("/")[0]


def _lost(before: dict[str, bytes], after: dict[str, bytes], *, moved: bool) -> list[str]:
    """Returns the files whose content is gone; with `moved`, content in another file counts."""
    contents = set(after.values())

    def kept(name, content):
        return after.get(name) == content or (moved and content in contents)

    return [name for name, content in before.items() if not kept(name, content)]


def _outcome(status: int, **known) -> Outcome:
    return Outcome(**dict(status=status, stdout="", stderr="", seconds=0, grown=0, lost=()) | known)


# -- one process for many cases --------------------------------------------------------------------


class _InsideProcess:
    """The child that runs INSIDE cases."""

    def __init__(self):
        question_end, questions = os.pipe()
        answers, answer_end = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(questions), os.close(answers)
            with _exit_like_python():
                _serve(os.fdopen(question_end), os.fdopen(answer_end, "w"))
        os.close(question_end), os.close(answer_end)
        self._questions, self._answers = os.fdopen(questions, "w"), os.fdopen(answers)

    def run(self, case: Case, folder: pathlib.Path) -> Outcome | None:
        """Runs a case; returns None if the process died."""
        with contextlib.suppress(OSError):
            print(json.dumps([dataclasses.asdict(case), str(folder)]), file=self._questions)
            self._questions.flush()
            if line := self._answers.readline():
                return Outcome(**json.loads(line))
        return None

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


def _serve(questions: typing.TextIO, answers: typing.TextIO) -> None:
    from kvjax.foundation import runtime

    signal.signal(signal.SIGALRM, _give_up)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(runtime, "keep_large_blocks"))
        for patch in _shortcuts():
            patches.enter_context(patch)
        for line in questions:
            fields, folder = json.loads(line)
            outcome = _run_inside(fields, folder)
            print(json.dumps(dataclasses.asdict(outcome)), file=answers, flush=True)


def _shortcuts() -> list:
    """Returns patches that end a case before it compiles or measures."""
    from jax.experimental import topologies

    from kvjax.analysis import __main__ as analysis
    from kvjax.convert import into_folder, into_workdir
    from kvjax.decoding import generator
    from kvjax.evaluate import evaluation
    from kvjax.kernels.profile import measured, static
    from kvjax.lm_eval import __main__ as lm_eval
    from kvjax.training import loop

    def instead(action: str):
        def end(*arguments, **options):
            raise Enough(action)

        return end

    class Program(loop.Program):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.init = instead("train")

    original = loop.TrainingLoop._loop

    def stop_before_training(self, state, position, start, stop):
        if start < stop:
            raise Enough(f"train from step {start}")
        return original(self, state, position, start, stop)

    patch = mock.patch.object
    return [
        patch(loop, "Program", Program),
        patch(loop.TrainingLoop, "_loop", stop_before_training),
        patch(generator, "Generation", instead("generate")),
        patch(into_workdir, "write", instead("convert")),
        patch(lm_eval, "extras", types.SimpleNamespace(require=instead("ask"))),
        patch(into_folder, "write", instead("export")),
        patch(evaluation, "opened", instead("evaluate")),
        patch(analysis, "_sections", instead("analyse")),
        patch(topologies, "get_topology_desc", instead("compile")),
        mock.patch.dict(sys.modules, {name: _installed(name) for name in COMPILERS}),
        *(patch(measured, name, instead("measure")) for name in ("measure", "tune")),
        *(patch(static, name, instead("compile")) for name in ("tpu", "gpu", "tune_tpu")),
    ]


def _installed(name: str) -> types.ModuleType:
    """Returns an empty module that the import system reports as installed."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module


def _give_up(number, frame):
    raise Stuck(f"over {STUCK_SECONDS} s")


def _run_inside(fields: dict, folder: str) -> Outcome:
    from kvjax.foundation import command_line

    os.chdir(folder)
    streams = {name: io.TextIOWrapper(io.BytesIO(), "utf-8") for name in ("stdout", "stderr")}
    stdin = io.TextIOWrapper(io.BytesIO(fields["stdin"].encode("latin-1")), "utf-8")
    begun, resident = time.process_time(), _resident("VmRSS")
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    signal.alarm(STUCK_SECONDS)
    with contextlib.ExitStack() as patches:
        for name, stream in (streams | dict(stdin=stdin)).items():
            patches.enter_context(mock.patch.object(sys, name, stream))
        patches.enter_context(mock.patch.dict(os.environ, fields["environment"]))
        try:
            status = command_line.status(main_of(fields["command"]), fields["arguments"])
        except BaseException:
            print(traceback.format_exc(), file=sys.stderr)
            status = 1
        finally:
            signal.alarm(0)
    output = {}
    for name, stream in streams.items():
        stream.flush()
        output[name] = stream.detach().getvalue().decode()
    seconds, grown = time.process_time() - begun, _resident("VmHWM") - resident
    return _outcome(status, seconds=seconds, grown=grown, **output)


def _resident(name: str) -> int:
    """Returns bytes of this process's memory, by a name in /proc/self/status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


# -- a process for each ----------------------------------------------------------------------------


def _run_in_own_process(case: Case, folder: pathlib.Path) -> Outcome:
    """Runs a case in a process of its own, with real streams and signals."""
    outputs = {name: folder.with_name(name) for name in ("stdout", "stderr")}
    for path in outputs.values():
        path.write_bytes(b"")
    folder.with_name("stdin").write_bytes(case.stdin.encode("latin-1"))
    reading, ready = os.pipe()  # ready: closed once the command begins
    resident, child = _resident("VmRSS"), os.fork()
    if not child:
        with _exit_like_python():
            _run_command(case, folder, ready)
    os.close(ready)
    os.read(reading, 1)
    os.close(reading)
    reached = _follow(child, case)
    _, status, used = os.wait4(child, 0)
    output = {name: path.read_bytes().decode(errors="replace") for name, path in outputs.items()}
    if not reached:
        output["stderr"] += f"stuck: over {STUCK_SECONDS} s"
    before = resident if case.how == FORKED else 10**9  # of an interpreter after its imports
    return _outcome(
        os.waitstatus_to_exitcode(status),
        seconds=used.ru_utime + used.ru_stime,
        grown=max((used.ru_maxrss << 10) - before, 0),
        **output,
    )


def _follow(child: int, case: Case) -> bool:
    """Interrupts a child if its case says so, and waits for it; returns False if it was killed."""

    def ended():
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    deadline = time.monotonic() + STUCK_SECONDS
    if case.interrupt is not None:
        while case.how == STARTED and IMPORTING not in _mapped(child) and not ended():
            time.sleep(0.005)
        time.sleep(case.interrupt)
        os.kill(child, signal.SIGINT)
    while not ended():
        time.sleep(0.01)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return False
    return True


def _mapped(process: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process}/maps").read_text()
    return ""


def _run_command(case: Case, folder: pathlib.Path, ready: int) -> None:
    """Opens the streams as a shell does, then runs the command in this child."""
    os.chdir(folder)
    os.environ.update(case.environment)
    # A background job of a shell script ignores the signal, and so would this child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open(number, getattr(case, name), folder.with_name(name))
    if case.how == STARTED:
        os.execv(sys.executable, [sys.executable, "-m", case.command, *case.arguments])
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        stream = None
        with contextlib.suppress(OSError):  # closed, as an interpreter sees it
            errors = "backslashreplace" if number == 2 else None
            stream = open(number, mode, encoding=encoding, errors=errors, closefd=False)
        setattr(sys, name, stream)
    sys.argv = [case.command, *case.arguments]
    from kvjax.foundation import command_line, interrupted

    interrupted.quietly()  # as kvjax/__init__.py does for `python -m`
    main = main_of(case.command)
    os.close(ready)
    command_line.run(main)


def _open(number: int, kind: str, path: pathlib.Path) -> None:
    if kind == "closed":
        os.close(number)
    elif kind in ("head", "shut"):
        read_end, write_end = os.pipe()
        if kind == "head" and not os.fork():
            os.close(write_end)
            line = os.fdopen(read_end, "rb").readline()
            path.write_bytes(line)
            os._exit(0)
        os.close(read_end)
        os.dup2(write_end, number)
        os.close(write_end)
    else:
        mode = os.O_RDONLY if number == 0 else os.O_WRONLY
        file = os.open("/dev/full" if kind == "full" else path, mode)
        os.dup2(file, number)
        os.close(file)


@contextlib.contextmanager
def _exit_like_python():
    """Ends a forked child with an interpreter's exit status, without the parent's cleanup."""
    status = 0
    try:
        yield
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except (OSError, ValueError):
            os.write(2, b"Exception ignored on flushing sys.stdout: Traceback\n")
            status = 120
        os._exit(status)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(pathlib.Path(sys.argv[1]).absolute())
