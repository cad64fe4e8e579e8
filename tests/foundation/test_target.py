"""Outputs are test-written before any work, and a failed write loses no result."""

import os
import re

from etils import epath
import pytest

from kvjax.foundation import target
from kvjax.foundation.errors import UserError


def test_a_file_that_can_be_written(tmp_path):
    """Writes into a missing folder, over a file, through a link; the check changes nothing."""
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    before = sorted(tmp_path.rglob("*"))
    for option, written in {"no/dir/x.json": "no/dir/x.json", "old": "old", "link": "old"}.items():
        path = target.check_file("--out", f"{tmp_path}/{option}")
        assert str(path) == f"{tmp_path}/{written}"
        assert sorted(tmp_path.rglob("*")) == before
        target.write(path.parent, {path.name: b"new"})
        assert path.read_text() == "new"
        if option == "no/dir/x.json":
            target._remove([path.parent, path.parent.parent])
            before = sorted(tmp_path.rglob("*"))
    assert (tmp_path / "link").is_symlink()


def test_files_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    for option, message in [
        (".", "is a folder"),
        ("/dev/null", "not a pipe"),
        ("pipe", "not a pipe"),
        ("file/x", "must be a folder, and .*file is a file"),
        ("x" * 300, "has a name of 300 bytes"),
        ("y" * 300 + "/x", "has a name of 300 bytes"),
        ("/proc/x/y", "nothing can be created in /proc ."),
    ]:
        with pytest.raises(UserError, match=f"(?s)^--plot = .*{message}"):
            target.check_file("--plot", option)
        assert sorted(tmp_path.rglob("*")) == before, option


def test_a_new_folder_is_removed_if_the_work_fails(tmp_path):
    folder, path = tmp_path / "a" / "b", epath.Path(tmp_path) / "a" / "b"
    with target.folder(path):
        assert folder.is_dir()
    assert folder.is_dir()
    os.rmdir(folder)
    with pytest.raises(KeyError), target.folder(path):
        raise KeyError
    assert folder.parent.is_dir() and not folder.exists()  # as it was
    folder.write_text("")
    with (
        pytest.raises(UserError, match=f"^--out: {folder}/c cannot be created: "),
        target.folder(path / "c"),
    ):
        pass
    folder.unlink()
    os.mkfifo(folder)
    for out, names, message in (
        (folder.parent, ["x", "b"], "b is a pipe or device: give another"),
        (tmp_path, ["a"], "a is a folder: give another, or move it"),
    ):
        with pytest.raises(UserError, match=f"^--out = '{out}': {message}$"):
            target.check(str(out), names)
    assert str(target.check(f"{tmp_path}/c", ["x"], "--to")) == f"{tmp_path}/c"
    with pytest.raises(UserError, match="^--to = "):
        target.check(f"{folder}/x", ["x"], "--to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_failed_write_goes_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(target.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match="^--out: .*cannot be written .*Nothing is lost: "
    ) as raised:
        target.write(epath.Path(tmp_path / "file"), {"a.html": b"one", "b.json": b"two"})
    paths = re.findall(r"/\S+\.(?:html|json)\b", str(raised.value).partition("lost: ")[2])
    assert [open(path, "rb").read() for path in paths] == [b"one", b"two"]
    monkeypatch.setattr(target.tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(UserError, match="Nor can anything be written to "):
        target.write(epath.Path(tmp_path / "file"), {"a.html": b"one"})
