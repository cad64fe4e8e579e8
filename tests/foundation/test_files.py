"""Files are written atomically, named uniquely, moved and listed."""

from etils import epath
import pytest

from kvjax.foundation import files


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = epath.Path(tmp_path) / "config.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    files.write_atomically(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [tmp_path / "config.json"]


def test_unused_names(tmp_path):
    path = epath.Path(tmp_path) / "metrics.jsonl"
    for name in ("metrics.jsonl", "metrics-2.jsonl", "metrics-3.jsonl"):
        unused = files.unused(path)
        assert unused.name == name
        unused.write_text("")


def test_files_and_folders_are_moved_there_and_in_buckets(bucket, tmp_path):
    (bucket / "x").mkdir()
    for top in (epath.Path(tmp_path) / "top", epath.Path("gs://x/top")):
        (top / "a" / "in").mkdir(parents=True)
        for name in ("a/1", "a/in/2", "3"):
            (top / name).write_text(name)
            assert files.size(top / name) == len(name)
        for name in ("a", "3", "none"):
            files.move(top / name, top / f"to-{name}")
        moved = [top / "to-a" / "1", top / "to-a" / "in" / "2"]
        assert [path.read_text() for path in (*moved, top / "to-3")] == ["a/1", "a/in/2", "3"]
        assert not (top / "a" / "1").exists() and files.size(top / "a" / "1") is None
        assert files.size(moved[0] / "below") is None


def test_names_are_found_wherever_their_folder_is(tmp_path):
    """Finds the files that pathlib's glob finds, except hidden ones."""
    for name in ("plain", "w[1]*{x}?", "w1"):
        folder = tmp_path / name
        assert files.matching_entries(epath.Path(folder), "*") == []
        folder.mkdir()
        for file in ("b.json", "a.json", "a.jsonl", ".b.json", "[1].json"):
            (folder / file).write_text("")
        for pattern in ("*.json", "a*", "[ab].json", "none"):
            expected = sorted(p for p in folder.glob(pattern) if p.name[0] != ".")
            assert files.matching_entries(epath.Path(folder), pattern) == expected
    assert files.matching_entries(epath.Path(folder / "a.json"), "*") == []
