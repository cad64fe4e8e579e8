"""System calls of a locked interpreter, in order, with the numbers of the kernel's headers.

Nothing is locked: the calls are recorded.
"""

import ctypes
import errno
import fcntl
import os
import resource
import signal
import sys

import pytest

from kvjax.sandbox.inside import landlock, limits, lock, system_calls

# By version of Landlock: restricted file rights, network rights and scopes; bytes of these masks.
RULESETS = {
    1: ((1 << 13) - 1, 0, 0, 8),
    2: ((1 << 14) - 1, 0, 0, 8),
    3: ((1 << 15) - 1, 0, 0, 8),
    4: ((1 << 15) - 1, 3, 0, 16),
    5: ((1 << 16) - 1, 3, 0, 16),
    6: ((1 << 16) - 1, 3, 3, 24),
    7: ((1 << 16) - 1, 3, 3, 24),
}


def test_landlock_takes_every_right_that_its_version_knows(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for version, (*rights, size) in RULESETS.items():
        calls, ruleset = [], os.open("/dev/null", os.O_RDONLY)
        opened = []

        def call(number, *args, version=version, calls=calls, ruleset=ruleset, opened=opened):
            if args[0] is None:
                calls.append((number, *args))
                return version
            if number == 444:
                rules = args[0]._obj
                calls.append((number, rules.files, rules.network, rules.scope, *args[1:]))
                return ruleset
            if number == 445:
                rule = bytes(args[2]._obj)
                allowed, parent = (int.from_bytes(b, sys.byteorder) for b in (rule[:8], rule[8:]))
                assert fcntl.fcntl(parent, fcntl.F_GETFD) == fcntl.FD_CLOEXEC and len(rule) == 12
                opened.append(parent)
                path = os.readlink(f"/proc/self/fd/{parent}")
                calls.append((number, args[0] == ruleset, args[1], allowed, path, args[3]))
            else:
                calls.append((number, args[0] == ruleset, *args[1:]))
            return 0

        monkeypatch.setattr(landlock, "system_call", call)
        assert landlock.restrict([str(tmp_path), str(tmp_path / "file")]) == version
        assert calls == [
            (444, None, 0, 1),
            (444, *rights, size, 0),
            (445, True, 1, 12, str(tmp_path), 0),
            (445, True, 1, 4, str(tmp_path / "file"), 0),
            (446, True, 0),
        ]
        for descriptor in (*opened, ruleset):
            with pytest.raises(OSError):
                os.fstat(descriptor)


def test_limits_are_lowered_and_never_raised(monkeypatch):
    limits_set, hard = {}, {resource.RLIMIT_NOFILE: 20, resource.RLIMIT_CPU: 4}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, hard.get(kind, -1)))
    monkeypatch.setattr(resource, "setrlimit", limits_set.__setitem__)
    limits.limit(memory_bytes=1000, cpu_seconds=4, processes=2)
    names = ("FSIZE", "CORE", "MEMLOCK", "MSGQUEUE")
    kinds = [getattr(resource, f"RLIMIT_{name}", None) for name in names]
    others = {kind: (0, 0) for kind in kinds if kind is not None} | {
        resource.RLIMIT_NOFILE: (20, 20)
    }
    requested = {resource.RLIMIT_AS: (1000, 1000), resource.RLIMIT_NPROC: (2, 2)}
    assert limits_set == others | requested | {resource.RLIMIT_CPU: (4, 4)}
    limits_set.clear(), hard.clear()
    limits.limit(memory_bytes=None, cpu_seconds=4, processes=None)
    assert limits_set == others | {resource.RLIMIT_CPU: (4, 5), resource.RLIMIT_NOFILE: (32, 32)}


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_process_is_locked_in_this_order(monkeypatch, tmp_path):
    calls = []

    def write(name, answer=None):
        return lambda *a, **k: calls.append((name, a, k)) or answer

    def fails(*args):
        raise OSError(errno.ENOSYS, "")

    monkeypatch.setattr(lock, "prctl", write("prctl"))
    monkeypatch.setattr(lock, "drop_capabilities", write("drop"))
    monkeypatch.setattr(lock.limits, "limit", write("limit"))
    monkeypatch.setattr(lock.landlock, "restrict", write("landlock", 6))
    monkeypatch.setattr(lock.seccomp, "restrict", fails)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "none")])
    alone = [("prctl", (38, 1), {}), ("prctl", (4, 0), {}), ("limit", (), dict(cpu_seconds=3))]
    alone.insert(0, ("prctl", (1, signal.SIGKILL), {}))
    held = lock.lock(use_landlock=True, use_seccomp=True, parent=os.getppid(), cpu_seconds=3)
    assert held == dict(landlock=6, seccomp=-errno.ENOSYS)
    assert calls == [*alone, ("landlock", ([str(tmp_path)],), {}), ("drop", (), {})]
    calls.clear()
    assert lock.lock(use_landlock=False, use_seccomp=False, parent=None, cpu_seconds=3) == {}
    assert calls == alone
    with pytest.raises(SystemExit):
        lock.lock(use_landlock=False, use_seccomp=False, parent=os.getppid() + 1)


def test_system_calls_have_their_arguments_and_their_errors(monkeypatch):
    calls = []

    class Library:
        def __getattr__(self, name):
            def call(*args):
                calls.append(
                    (name, *(list(a) if hasattr(a, "_length_") else a.value for a in args))
                )
                ctypes.set_errno(errno.EPERM)
                return -1 if len(calls) == 4 else 0

            return call

    monkeypatch.setattr(system_calls, "_LIBRARY", Library())
    assert system_calls.system_call(444, 1 << 40, ctypes.c_int(7)) == 0
    system_calls.prctl(38, 1)
    system_calls.drop_capabilities()
    with pytest.raises(OSError, match="Operation not permitted") as error:
        system_calls.prctl(4, 0)
    assert error.value.errno == errno.EPERM
    assert calls == [
        ("syscall", 444, 1 << 40, 7),
        ("prctl", 38, 1, 0, 0, 0),
        ("capset", [0x20080522, 0], [0] * 6),
        ("prctl", 4, 0, 0, 0, 0),
    ]
