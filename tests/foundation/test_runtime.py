"""Paths, the cache, threads, memory and the set-up of a process."""

import logging
import os
import pathlib
import subprocess
import sys
import types

import jax
import psutil
import pytest

from kvjax.convert import __main__ as convert
from kvjax.foundation import command_line, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError


@pytest.mark.parametrize(
    "text, message",
    [
        ("gs://bucket/x", r"gs:// needs the package gcsfs: pip install 'kvjax\[gcs\]'"),
        ("s3://bucket/x", "s3:// needs the package s3fs: pip install"),
        ("hdfs://host/x", "hdfs:// is not supported; give a local path, gs://BUCKET"),
        ("://x", ":// is not supported"),
        ("\udcff", "is not UTF-8 text"),
        ("runs/" + "x" * 256, "has a name of 256 bytes; file systems take 255"),
    ],
)
def test_unsupported_paths(monkeypatch, text, message):
    monkeypatch.setitem(runtime.BUCKETS, "gs", ("gcsfs_", runtime.BUCKETS["gs"][1]))
    if "gcsfs" in message:
        message = message.replace("gcsfs", "gcsfs_")
    with pytest.raises(UserError, match=f"^--workdir = .*{message}"):
        runtime.path("--workdir", text)


def test_a_pipe_is_refused_unless_a_shell_made_it(tmp_path, monkeypatch):
    """Opening a pipe blocks until it has a writer; /dev/fd/N, a shell's <(COMMAND), has one."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("pipe", "link")
    for text in ("pipe", "link", "/dev/null"):
        with pytest.raises(
            UserError, match=f"^--a = '{text}': must be a file or folder, not a pipe"
        ):
            runtime.path("--a", text)
    with pytest.raises(UserError, match=r"^--config=pipe: no such file"):
        command_line.load_config(pathlib.Path("pipe"))
    read, _ = os.pipe()
    assert str(runtime.path("--a", f"/dev/fd/{read}")) == f"/dev/fd/{read}"


def test_a_path_is_absolute_and_a_bucket_as_it_is(bucket, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert str(runtime.path("--workdir", "a/../b")) == f"{tmp_path}/b"
    assert str(runtime.path("--workdir", "~/b")) == f"{tmp_path}/home/b"
    assert str(runtime.path("--workdir", "gs://bucket/b")) == "gs://bucket/b"
    with pytest.raises(UserError, match="names no bucket"):
        runtime.path("--workdir", "gs://")


def test_paths_with_a_backslash_are_refused(monkeypatch, tmp_path):
    """TensorStore reads a backslash as a slash, in the path or in the current folder."""
    folder, link = tmp_path / "a\\b", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    monkeypatch.chdir(folder)
    for path in ("run", folder):
        with pytest.raises(UserError, match="^--workdir = .*backslash"):
            runtime.workdir(path)
    with pytest.raises(UserError, match="^--out = .*backslash"):
        convert.main([f"--source={tmp_path}", f"--out={folder / 'm'}"])
    assert runtime.workdir(link / "run")  # TensorStore follows it


def test_the_cache_is_a_folder_and_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for cache in ("file", "file/below", str(tmp_path / "file")):
        monkeypatch.setenv("KVJAX_CACHE", cache)
        with pytest.raises(UserError, match=f"^KVJAX_CACHE = '{cache}': must be a folder"):
            runtime.cache_directory()
    monkeypatch.setenv("KVJAX_CACHE", "new/cache")
    path = runtime.cache_directory()
    monkeypatch.chdir("/")
    assert str(path) == f"{tmp_path}/new/cache"


def test_cores_are_those_of_the_container(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(96))
    quotas = {"800000 100000": 8, "150000 100000": 1, "5000 100000": 1, "max 100000": 96, "": 96}
    for quota, cores in quotas.items():
        (tmp_path / "cpu.max").write_text(quota)
        assert runtime.cores() == cores


FORCED = "--xla_force_host_platform_device_count="


def test_collectives_have_threads(monkeypatch):
    for variables, threads in (
        (dict(XLA_FLAGS=f"{FORCED}2 {FORCED}8"), "128"),  # XLA takes the last
        (dict(JAX_NUM_CPU_DEVICES="4"), "64"),
        (dict(XLA_FLAGS=f"{FORCED}8", NPROC="9"), "9"),
        (dict(XLA_FLAGS=f"{FORCED}1"), None),
        ({}, None),
    ):
        monkeypatch.setattr(os, "environ", dict(variables))
        runtime.give_collectives_threads()
        assert os.environ.get("NPROC") == threads


@pytest.mark.slow
def test_xla_obeys_nproc():
    """XLA has one thread per device by default."""
    code = "import os\nfrom kvjax.foundation import runtime\nruntime.{}()\n"
    code += "import jax\nassert len(jax.devices()) == 8\nprint(len(os.listdir('/proc/self/task')))"
    environment = os.environ | dict(XLA_FLAGS=f"{FORCED}8", JAX_PLATFORMS="cpu")
    counted = []
    for function in ("quiet_libraries", "start"):
        command = [sys.executable, "-c", code.format(function)]
        counted.append(int(subprocess.check_output(command, cwd=ROOT, env=environment, text=True)))
    assert counted[0] < 60 < 128 <= counted[1]


def test_start(monkeypatch, tmp_path):
    """Sets the allocator, a compilation cache unless JAX has one, and logging."""
    updates, allocator_calls, values = [], [], types.SimpleNamespace(jax_compilation_cache_dir=None)
    values.update = lambda *args: updates.append(args)
    library = types.SimpleNamespace(mallopt=lambda *args: allocator_calls.append(args))
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(jax, "config", values)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    runtime.start()
    cache = [
        ("jax_compilation_cache_dir", f"{tmp_path}/compiled"),
        ("jax_persistent_cache_min_compile_time_secs", 0.5),
    ]
    assert updates == cache and allocator_calls == [(-4, 0), (-1, -1), (-8, 1)]
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"
    levels = [logging.getLogger(name).level for name in ("absl", "jax", "orbax")]
    assert levels == [logging.ERROR] * 3
    runtime.start(compilation_cache=False)
    values.jax_compilation_cache_dir = str(tmp_path)
    runtime.start()
    assert updates == cache
    (tmp_path / "file").write_text("")
    values.jax_compilation_cache_dir = str(tmp_path / "file")
    with pytest.raises(UserError, match="^JAX_COMPILATION_CACHE_DIR = .*must be a folder"):
        runtime.start()
    library.mallopt = None  # a C library other than glibc
    del library.mallopt
    runtime.keep_large_blocks()
    monkeypatch.setattr(sys, "platform", "darwin")
    library.mallopt = pytest.fail
    runtime.keep_large_blocks()


def test_memory_of_a_device(monkeypatch, tmp_path):
    available = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    limit, device = tmp_path / "memory.max", types.SimpleNamespace(platform="cpu")
    monkeypatch.setattr(runtime.epath, "Path", lambda path: limit)
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert runtime.memory_per_device() == 500
    for quota, expected in (("max\n", 500), ("300\n", 150), ("7000\n", 500)):
        limit.write_text(quota)
        assert runtime.memory_per_device() == expected
    device.platform, device.memory_stats = "gpu", lambda: dict(bytes_limit=77, bytes_in_use=3)
    assert runtime.memory_per_device() == 77
