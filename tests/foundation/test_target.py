"""Outputs are test-written before any work, and a failed write loses no result."""

import os
import re

from etils import epath
import pytest

from kvjax.foundation import target
from kvjax.foundation.errors import UserError


def test_a_file_that_can_be_written(tmp_path):
    """Writes to a folder that is not there, over a file, through a link; checks change nothing."""
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    before = sorted(tmp_path.rglob("*"))
    for given, meant in {"no/dir/x.json": "no/dir/x.json", "old": "old", "link": "old"}.items():
        path = target.check_file("--out", f"{tmp_path}/{given}")
        assert str(path) == f"{tmp_path}/{meant}"
        assert sorted(tmp_path.rglob("*")) == before
        target.write(path.parent, {path.name: b"new"})
        assert path.read_text() == "new"
        if given == "no/dir/x.json":
            target._remove([path.parent, path.parent.parent])
            before = sorted(tmp_path.rglob("*"))
    assert (tmp_path / "link").is_symlink()


def test_files_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    for given, said in [
        (".", "is a folder"),
        ("/dev/null", "not a pipe"),
        ("pipe", "not a pipe"),
        ("file/x", "must be a folder, and .*file is a file"),
        ("x" * 300, "has a name of 300 bytes"),
        ("y" * 300 + "/x", "has a name of 300 bytes"),
        ("/proc/x/y", "nothing can be created in /proc ."),
    ]:
        with pytest.raises(UserError, match=f"(?s)^--plot = .*{said}"):
            target.check_file("--plot", given)
        assert sorted(tmp_path.rglob("*")) == before, given


def test_a_new_folder_is_removed_if_the_work_fails(tmp_path):
    made, path = tmp_path / "a" / "b", epath.Path(tmp_path) / "a" / "b"
    with target.folder(path):
        assert made.is_dir()
    assert made.is_dir()
    os.rmdir(made)
    with pytest.raises(KeyError), target.folder(path):
        raise KeyError
    assert made.parent.is_dir() and not made.exists()  # as it was
    made.write_text("")
    with (
        pytest.raises(UserError, match=f"^--out: {made}/c cannot be created: "),
        target.folder(path / "c"),
    ):
        pass
    made.unlink()
    os.mkfifo(made)
    for out, names, said in (
        (made.parent, ["x", "b"], "b is a pipe or device: give another"),
        (tmp_path, ["a"], "a is a folder: give another, or move it"),
    ):
        with pytest.raises(UserError, match=f"^--out = '{out}': {said}$"):
            target.check(str(out), names)
    assert str(target.check(f"{tmp_path}/c", ["x"], "--to")) == f"{tmp_path}/c"
    with pytest.raises(UserError, match="^--to = "):
        target.check(f"{made}/x", ["x"], "--to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_failed_write_goes_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(target.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="^--out: .*cannot be written .*Nothing is lost: ") as told:
        target.write(epath.Path(tmp_path / "file"), {"a.html": b"one", "b.json": b"two"})
    kept = re.findall(r"/\S+\.(?:html|json)\b", str(told.value).partition("lost: ")[2])
    assert [open(path, "rb").read() for path in kept] == [b"one", b"two"]
    monkeypatch.setattr(target.tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(UserError, match="Nor can anything be written to "):
        target.write(epath.Path(tmp_path / "file"), {"a.html": b"one"})
