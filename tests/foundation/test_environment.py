"""Bad values of JAX's environment variables give one line and status 2."""

import os
import subprocess
import sys

import pytest

from kvjax.foundation import environment

# Variable, value, message; the first is refused when JAX is imported.
BAD = [
    ("JAX_ENABLE_X64", "maybe", "JAX refuses it (invalid truth value 'maybe'"),
    ("JAX_NUM_CPU_DEVICES", "two", "JAX refuses it (Invalid value"),
    ("JAX_DEFAULT_DEVICE", "abacus", "JAX refuses it (jax.default_device must be"),
    ("JAX_DEFAULT_MATMUL_PRECISION", "some", "JAX refuses it (Invalid value"),
    ("JAX_PLATFORMS", "abacus", "Unable to initialize backend 'abacus'"),
    ("JAX_PLATFORMS", "tpu", "pip install 'kvjax[tpu]'"),
    ("JAX_PLATFORM_NAME", "abacus", "Unknown backend abacus"),
    ("JAX_COMPILATION_CACHE_DIR", "/dev/null", "must be a folder"),
]


@pytest.mark.parametrize("cases", ["first", pytest.param("others", marks=pytest.mark.slow)])
def test_bad_values_give_one_line(cases):
    for name, value, message in BAD[:1] if cases == "first" else BAD[1:]:
        _check(name, value, message)


def _check(name: str, value: str, message: str) -> None:
    # This command initialises devices before it checks its options.
    command = [sys.executable, "-m", "kvjax.lm_eval", "--workdir=no", "--tasks=no"]
    environment = os.environ | {name: value}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("kvjax: ") and run.stderr.count("\n") == 1 and name in run.stderr
    assert f"={value}" in run.stderr or repr(value) in run.stderr
    assert message in run.stderr


def test_an_import_that_the_environment_fails_ends_the_process(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: ended.append(args))
    monkeypatch.setattr(environment.os, "_exit", ended.append)
    monkeypatch.setenv("JAX_PLATFORMS", "CUDA,tpu")
    monkeypatch.setenv("JAX_PLATFORM_NAME", "x")
    monkeypatch.setattr(environment.gc, "disable", lambda: None)
    environment.watch_imports()
    bug = KeyError, KeyError("a bug"), None
    sys.excepthook(*bug)
    assert ended == [bug] and capsys.readouterr() == ("", "")
    error = RuntimeError("Unable to initialize backend 'cuda': no\nmore")
    sys.excepthook(RuntimeError, error, None)
    assert ended[1:] == [2]
    installs = "".join(
        f"pip install 'kvjax[{extra}]' installs its plugin; " for extra in ("cuda", "tpu")
    )
    assert capsys.readouterr() == (
        "",
        "kvjax: JAX_PLATFORMS=CUDA,tpu JAX_PLATFORM_NAME=x: Unable to initialize backend 'cuda': "
        f"no. {installs}JAX_PLATFORMS=cpu runs on the CPU\n",
    )


def test_garbage_is_collected_once_a_command_is_imported():
    code = "import gc, sys; sys.argv = ['-m']; from kvjax.foundation import command_line as c; "
    code += "a = gc.isenabled(); sys.argv = ['x']; c.run(lambda _: print(a, gc.isenabled()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False True\n"
