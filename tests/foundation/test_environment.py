"""Bad values of JAX's and XLA's environment variables: one line, status 2, whatever the command."""

import os
import subprocess
import sys

import pytest

from kvjax.foundation import environment
from kvjax.foundation.errors import UserError

# A variable, its value, and what is said; the first is refused as JAX is imported, the second by
# XLA, which ends the process.
BAD = [
    ("JAX_ENABLE_X64", "maybe", "JAX refuses it (invalid truth value 'maybe'"),
    ("XLA_FLAGS", "--no_such_flag=1", "Unknown flag in XLA_FLAGS: --no_such_flag=1"),
    ("JAX_NUM_CPU_DEVICES", "two", "JAX refuses it (Invalid value"),
    ("JAX_DEFAULT_DEVICE", "abacus", "JAX refuses it (jax.default_device must be"),
    ("JAX_DEFAULT_MATMUL_PRECISION", "some", "JAX refuses it (Invalid value"),
    ("JAX_PLATFORMS", "abacus", "Unable to initialize backend 'abacus'"),
    ("JAX_PLATFORMS", "tpu", "pip install 'kvjax[tpu]'"),
    ("JAX_PLATFORM_NAME", "abacus", "Unknown backend abacus"),
    ("JAX_COMPILATION_CACHE_DIR", "/dev/null", "must be a folder"),
    ("XLA_FLAGS", "no_such_file", 'Could not open file "no_such_file"'),
    ("XLA_FLAGS", "--xla_dump_to", "Unknown flag in XLA_FLAGS: --xla_dump_to"),
    ("XLA_FLAGS", "--xla_backend_optimization_level=x", "Couldn't interpret value x for flag"),
    ("XLA_FLAGS", "--xla_force_host_platform_device_count=1e9", "must be from 1 to 4,096"),
]


@pytest.mark.parametrize("cases", ["first", pytest.param("others", marks=pytest.mark.slow)])
def test_bad_values_are_told_in_one_line(cases):
    for name, value, said in BAD[:2] if cases == "first" else BAD[2:]:
        _check(name, value, said)


def _check(name: str, value: str, said: str) -> None:
    # Looks at the devices before anything else.
    command = [sys.executable, "-m", "kvjax.lm_eval", "--workdir=no", "--tasks=no"]
    environment = os.environ | {name: value}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("kvjax: ") and run.stderr.count("\n") == 1 and name in run.stderr
    assert f"={value}" in run.stderr or repr(value) in run.stderr or "device_count" in value
    assert said in run.stderr


def test_how_many_devices_there_may_be(monkeypatch):
    count = "--xla_force_host_platform_device_count="
    monkeypatch.setattr(environment, "_xla_error", lambda: "")
    for number in ("1", "4096", "0", "4097", "-2", "1e9", "9" * 10, ""):
        for name, given in (("JAX_NUM_CPU_DEVICES", number), ("XLA_FLAGS", f"--x {count}{number}")):
            with monkeypatch.context() as patch:
                patch.delenv("XLA_FLAGS", raising=False)
                patch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
                patch.setenv(name, given)
                if number in ("1", "4096"):
                    environment.check()
                    continue
                said = f"^{name}.* = '{number}': must be from 1 to 4,096$"
                with pytest.raises(UserError, match=said):
                    environment.check()
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "-1")  # JAX's own default
    monkeypatch.setenv("XLA_FLAGS", "--x")
    environment.check()
    monkeypatch.setattr(environment, "_xla_error", lambda: "Unknown flag x")
    with pytest.raises(UserError, match="^XLA_FLAGS = '--x': Unknown flag x; correct or unset it$"):
        environment.check()


def test_an_import_that_the_environment_fails_ends_the_process(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: ended.append(args))
    monkeypatch.setattr(environment.os, "_exit", ended.append)
    monkeypatch.setenv("JAX_PLATFORMS", "CUDA,tpu")
    monkeypatch.setenv("JAX_PLATFORM_NAME", "x")
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
