"""Provenance of results: code digests on disk and in the history agree."""

import subprocess

import pytest

from experiments.tables import provenance_table
from kvjax.foundation import provenance


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Replaces the checkout by a repository of two committed Python files."""
    for folder in provenance.CODE:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(f"in_{folder} = 1\n")
    (tmp_path / "experiments" / "results").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "kvjax")
    monkeypatch.setattr(provenance_table, "ROOT", tmp_path)

    def run(*arguments):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        command = ["git", *who, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    run("init", "-q")
    run("add", "-A")
    run("commit", "-qm", "one")
    return run


def test_a_rewritten_commit_is_found_by_its_code(git, tmp_path):
    one = git("rev-parse", "HEAD")
    made_by = provenance.software()
    assert one.startswith(made_by["commit"])
    git("commit", "-q", "--amend", "-m", "rewritten")
    commits = frozenset(git("rev-list", "HEAD").split())
    codes = provenance_table._codes(commits)
    assert codes == [made_by["code"]]
    kind = provenance_table.kind
    assert kind(made_by, frozenset([one]), codes) == "commit"
    assert kind(made_by, commits, codes) == "same code"
    (tmp_path / "kvjax" / "a.py").write_text("in_kvjax = 2\n")
    changed = provenance.software()
    assert changed["commit"].endswith("+") and changed["code"] != made_by["code"]
    assert kind(changed, commits, codes) == "changed"
    assert kind(changed | dict(commit=made_by["commit"]), commits, codes) == "gone"
    assert kind(dict(commit="of each row"), commits, codes) == "several"
