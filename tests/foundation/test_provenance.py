"""Provenance of results: command, commit, machine, versions, seconds."""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys

import jax
import pytest

from kvjax.foundation import provenance
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError


def test_a_result_has_its_provenance(tmp_path, monkeypatch, capsys):
    now = provenance._BEGUN + 12.34
    monkeypatch.setattr(provenance.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "argv", ["x.py", "--a=1 *", "--b"])
    monkeypatch.setattr(provenance, "program", lambda: "python -m x")
    changes = ["status", "--short", "--", ":/", ":(top,exclude)experiments/results"]
    outputs = {("rev-parse", "--short", "HEAD"): "1234567", tuple(changes): " M kvjax/x.py"}
    monkeypatch.setattr(provenance, "_git", lambda *args: outputs[args])
    monkeypatch.chdir(tmp_path)
    provenance.save(tmp_path / "made" / "x.json", dict(figure=1), "pytest", "no_such_package")
    assert capsys.readouterr() == ("", "kvjax: written: made/x.json\n")
    text = (tmp_path / "made" / "x.json").read_text()
    result = json.loads(text)
    assert text == json.dumps(result, indent=1) + "\n"
    made_by = result.pop("made_by")
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pytest")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    with open("/proc/cpuinfo") as file:
        names = [line.split(": ")[1].strip() for line in file if line.startswith("model name")]
    assert len(made_by.pop("date")) == len("2026-01-01")
    assert result == dict(figure=1) and list(made_by.pop("code")) == ["kvjax", "experiments"]
    assert made_by == {
        "command": "python -m x '--a=1 *' --b",
        "commit": "1234567+",
        "machine": f"{names[0]}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "process_seconds": 12.3,
    }
    provenance.save(tmp_path / "made" / "x.json", dict(figure=2), quiet=True)
    assert capsys.readouterr() == ("", "")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(provenance.target.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match="^--save: .*file cannot be written"):
        provenance.save(tmp_path / "file" / "x.json", {})
    with pytest.raises(
        UserError, match=r"^--write: the checkout has uncommitted changes .*\(M kvjax/x.py\)"
    ):
        provenance.check_commit("--write", ROOT / "experiments")
    provenance.check_commit("--write", tmp_path)


def test_code_digests(monkeypatch, tmp_path):
    for name, content in {"kvjax/b.py": "b", "kvjax/in/a.py": "é", "kvjax/c.txt": "c"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)

    def blob(content):
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    lines = f"kvjax/b.py {blob(b'b')}\nkvjax/in/a.py {blob('é'.encode())}\n"
    digest = hashlib.sha256(lines.encode()).hexdigest()[:16]
    assert provenance.code_on_disk() == dict(kvjax=digest)


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance._git("rev-parse", "HEAD") == ""
    assert provenance.software()["commit"] == ""


def test_an_enclosing_repository_is_another_projects(monkeypatch, tmp_path):
    assert provenance._git("rev-parse", "--is-inside-work-tree") == "true"
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance._git("rev-parse", "--is-inside-work-tree") == ""
