"""Files of a workdir: written whole, and beside what is there."""

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


def test_what_is_there_keeps_its_name(tmp_path):
    path = epath.Path(tmp_path) / "metrics.jsonl"
    for name in ("metrics.jsonl", "metrics-2.jsonl", "metrics-3.jsonl"):
        unused = files.unused(path)
        assert unused.name == name
        unused.write_text("")


def test_names_are_found_wherever_their_folder_is(tmp_path):
    """Finds the files that pathlib's glob finds, except hidden ones."""
    for name in ("plain", "w[1]*{x}?", "w1"):
        folder = tmp_path / name
        assert files.named(epath.Path(folder), "*") == []
        folder.mkdir()
        for file in ("b.json", "a.json", "a.jsonl", ".b.json", "[1].json"):
            (folder / file).write_text("")
        for pattern in ("*.json", "a*", "[ab].json", "none"):
            want = sorted(p for p in folder.glob(pattern) if p.name[0] != ".")
            assert files.named(epath.Path(folder), pattern) == want
    assert files.named(epath.Path(folder / "a.json"), "*") == []
