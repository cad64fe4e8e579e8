"""All attacks: on every combination of layers, by other users, on kernels that lack a layer."""

import json
import shutil
import subprocess
import sys

import pytest

from kvjax import sandbox
from kvjax.sandbox.box import Box
from kvjax.sandbox.layers import Layers
from tests.sandbox import attacks, held, missing, nobody

pytestmark = pytest.mark.skipif(missing.PROCESSOR is None, reason="attacks are of Linux")


def through(*rows):
    """Returns successful attacks by combination; fails if no combination was tried."""
    assert any("layers" in row for row in rows), rows
    return {row["combination"]: row["through"] for row in rows if row.get("through")}


def lines(run):
    assert run.returncode in (0, 1) and run.stdout, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", held.COMBINATIONS)
def test_every_attack_is_held(name):
    (row,) = held.table([name], quick=False)
    if "missing" in row:
        pytest.skip(row["missing"])
    assert not through(row)
    assert row["tried"] > 280


@pytest.mark.slow
@pytest.mark.skipif(nobody.why_not() is not None, reason=str(nobody.why_not()))
def test_every_attack_of_another_user_is_held():
    rows = lines(nobody.run(["-m", "tests.sandbox.held", "S+L", "S+N", "--json", "--quick"]))
    assert not through(*rows)
    assert {row["user"] for row in rows} == {65534}


@pytest.mark.slow
def test_every_attack_is_held_where_there_are_no_namespaces():
    command = "echo 0 > /proc/sys/user/max_user_namespaces && exec $0 $@"
    unshare = ["unshare", "--user", "--map-root-user", "sh", "-c", command]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("no user namespace to forbid further ones in")
    run = subprocess.run(
        [*unshare, sys.executable, *"-m tests.sandbox.held S+L S+N --json --quick".split()],
        capture_output=True,
        text=True,
        check=False,
    )
    tried, untried = lines(run)
    assert not through(tried)
    assert "bwrap" in untried["missing"]


@pytest.mark.slow
def test_attacks_work_where_there_are_no_layers():
    programs = {name: attacks.BREACHES[name] for name in attacks.REAL}
    successful = held.try_all(Box(Layers(), held.LIMITS), programs)
    assert set(attacks.REAL) <= set(successful)
    assert successful[len(attacks.REAL) :], "what they did outside is not seen"


OPEN = """
from kvjax import sandbox
try:
    print(sandbox.open({policy!r}).layers)
except sandbox.SandboxError as error:
    print("refused:", error)
"""


def opened(lacks, policy="linux"):
    """Returns the message of opening a box on a kernel that lacks something."""
    code = OPEN.format(policy=policy)
    command = [sys.executable, "-m", "tests.sandbox.missing", lacks, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_seccomp_it_is_refused():
    message = opened("seccomp")
    assert "refused: no sandbox works here" in message
    assert "linux: seccomp: Function not implemented (ENOSYS)" in message


def test_a_layer_that_is_asked_for_must_hold():
    code = """
from kvjax.sandbox.box import Box
from kvjax.sandbox.layers import Layers
Box(Layers(seccomp=True, landlock=True))
"""
    command = ["-m", "tests.sandbox.missing", "landlock", sys.executable, "-c", code]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert "SandboxError: landlock: Function not implemented (ENOSYS)" in run.stderr


@pytest.mark.slow
def test_without_landlock_namespaces_must_do():
    try:
        held.COMBINATIONS["S+N"]()
    except sandbox.SandboxError:
        expected = "refused: no sandbox works here, so nothing is run. linux: landlock: Function"
    else:
        expected = "('rlimits', 'seccomp', 'namespaces (bwrap"
    assert opened("landlock").startswith(expected)


@pytest.mark.slow
def test_webassembly_does_where_the_kernel_does_not():
    try:
        held.COMBINATIONS["W"]()
    except sandbox.SandboxError as error:
        pytest.skip(str(error))
    assert opened("seccomp,landlock", "auto").startswith("('rlimits', 'wasm (wasmtime")


FORGED = (
    *("leave", "leave at once", "leave in the call", "leave in the call at once"),
    *("equal to everything", "reads the expected value from its caller"),
)


def test_forgeries_pass_where_program_and_test_share_an_interpreter():
    """Compares exit statuses with a right and a wrong program's."""
    once = "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)\n"
    programs = ["def add(a, b): return a + b", *map(attacks.FORGERIES.get, FORGED), ""]
    codes = [[sys.executable, "-I", "-c", f"{program}\n{once}"] for program in programs]
    statuses = [subprocess.run(code, stderr=subprocess.DEVNULL).returncode for code in codes]
    assert [status == 0 for status in statuses] == [True] * (len(FORGED) + 1) + [False]
