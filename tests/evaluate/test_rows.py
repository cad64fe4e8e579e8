"""Saved rows are kept and not evaluated again."""

import dataclasses
import json

from etils import epath
import pytest

from kvjax.evaluate import compare, rows as rows_lib, summary
from kvjax.foundation.errors import UserError
from tests import damage

IDENTITY = dict(checkpoint="a", data="b")


@pytest.fixture
def opened():
    """A function that opens a RowStore and closes the one before, as after a kill."""
    before = []

    def make(*given) -> rows_lib.RowStore:
        while before:
            before.pop().close()
        before.append(rows_lib.RowStore(*given))
        return before[0]

    return make


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path / "run [1]*{x}" / "evaluations" / "8")  # must not be read as a glob


def _row(i):
    return dict(index=i, right=bool(i % 2))


def test_missing_rows(folder, opened):
    rows = opened(folder, "mmlu", IDENTITY, (0, 1))
    assert rows.missing(4) == [0, 1, 2, 3]
    rows.add([_row(2), _row(0)])
    assert rows.missing(4) == [1, 3]
    again = opened(folder, "mmlu", IDENTITY, (0, 1))
    assert again.missing(4) == [1, 3] and again.done == {0: _row(0), 2: _row(2)}
    (folder / "list.json").write_text("[1]")  # an unrelated file
    assert rows_lib.day(folder) == ""
    verdicts = {"mmlu": {0: False, 2: False}}
    (folder.parent.parent / "metrics.jsonl").write_text("{}\n")  # as every trained run has
    for name in (folder, folder.parent.parent):
        assert compare.open(str(name)).verdicts == verdicts


def test_rows_of_different_prompts_are_not_compared(folder, opened):
    """Unless their tokenizers or templates differ."""
    for name, prompt, template in (("a", "p", 1), ("b", "p", 1), ("c", "q", 1), ("d", "q", 2)):
        identity = IDENTITY | dict(template=template)
        opened(folder / name, "mmlu", identity, (0, 1)).add([_row(0) | dict(prompt=prompt)])
    a, *others = (compare.open(str(folder / name)) for name in "abcd")
    for other in (others[0], others[2]):
        assert compare.compare([a], [other])["mmlu"]["rows"] == 1
    with pytest.raises(UserError, match="mmlu has other prompts for .*/a than for .*/c, though"):
        compare.compare([a], [others[1]])
    with_letters = dict(mmlu=a.identities["mmlu"] | dict(letters=[5, 6, 7, 8]))
    with pytest.raises(UserError, match="mmlu has other tokens as letters"):
        compare.compare([a], [dataclasses.replace(others[0], identities=with_letters)])
    for name, prompt in (("core_a", "p"), ("core_b", "q")):  # CORE's depend on positions
        opened(folder / name, "core_x", IDENTITY, (0, 1)).add([_row(0) | dict(prompt=prompt)])
    one, other = (compare.open(str(folder / name)) for name in ("core_a", "core_b"))
    assert compare.compare([one], [other])["core_x"]["rows"] == 1


def test_truncated_rows(folder, opened):
    opened(folder, "mmlu", IDENTITY, (0, 1)).add([_row(0), _row(1)])
    path = folder / "mmlu.jsonl"
    content = path.read_bytes()
    for cut in range(1, len(content)):
        path.write_bytes(content[:cut])
        rows = opened(folder, "mmlu", IDENTITY, (0, 1))
        rows.add([_row(i) for i in rows.missing(2)])
        assert opened(folder, "mmlu", IDENTITY, (0, 1)).done == {0: _row(0), 1: _row(1)}
        assert path.read_bytes().count(b"\n") == 2


def test_a_flipped_bit_is_refused_or_harmless(folder, opened):
    saved = [_row(i) | dict(answer=f'"J" {i}, é') for i in (0, 1)]
    opened(folder, "mmlu", IDENTITY, (0, 1)).add(saved)
    path = folder / "mmlu.jsonl"
    content = path.read_bytes()
    for broken in damage.flipped(content, step=5):
        path.write_bytes(broken)
        try:
            assert rows_lib.of_file(path) == saved, broken
        except UserError as error:
            assert "mmlu.jsonl, line " in str(error) and "is evaluated again" in str(error)
    # Without a checksum, as in old files.
    path.write_bytes(content + json.dumps(_row(2)).encode() + b"\n")
    assert rows_lib.of_file(path) == [*saved, _row(2)]


def test_tasks_with_similar_names(folder, opened):
    for i, name in enumerate(("core_a", "core_a.b", "core_[a]", "core_*", "core_a.0-of-1x")):
        opened(folder, name, IDENTITY, (0, 1)).add([_row(i)])
        assert opened(folder, name, IDENTITY, (0, 1)).done == {i: _row(i)}
    with pytest.raises(UserError, match="core_a/b: must not contain '/'"):
        opened(folder, "core_a/b", IDENTITY, (0, 1))


def test_several_processes_share_the_rows(folder, opened):
    shares = [rows_lib.RowStore(folder, "mmlu", IDENTITY, (i, 3)) for i in range(3)]
    assert [rows.missing(8) for rows in shares] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    shares[1].add([_row(1)])
    (folder / "mmlu.1-of-3.jsonl").write_bytes(
        (folder / "mmlu.1-of-3.jsonl").read_bytes() + b'{"index": 4,'
    )
    other = opened(folder, "mmlu", IDENTITY, (0, 1))  # does not truncate another process's file
    assert other.missing(4) == [0, 2, 3]
    assert (folder / "mmlu.1-of-3.jsonl").read_bytes().endswith(b'{"index": 4,')


def test_rows_of_another_model_are_refused(folder, opened):
    opened(folder, "mmlu", IDENTITY, (0, 1)).add([_row(0)])
    with pytest.raises(UserError, match="checkpoint = 'a', but this command has 'c'.*--out"):
        opened(folder, "mmlu", IDENTITY | dict(checkpoint="c"), (0, 1))
    # Another task has its own identity.
    opened(folder, "gsm8k", IDENTITY | dict(checkpoint="c"), (0, 1))


def test_identity_keys_of_earlier_versions(folder, opened):
    """Missing keys have their defaults; keys that a task does not have are not compared."""
    opened(folder, "mmlu", IDENTITY, (0, 1)).add([_row(0)])
    now, defaults = IDENTITY | dict(template="t"), dict(template="t", ends=[1])
    assert opened(folder, "mmlu", now, (0, 1), defaults).missing(2) == [1]
    for given in (dict(), dict(template="other")):
        with pytest.raises(UserError, match="template = .*, but this command has 't'"):
            opened(folder, "mmlu", now, (0, 1), given)


def test_rows_of_another_prompt_are_refused(folder, opened):
    """Compares the prompts of saved rows; the message names both digests."""
    rows = opened(folder, "mmlu", IDENTITY, (0, 1))
    rows.add([_row(0), _row(1) | dict(prompt="b"), _row(2) | dict(prompt="c")])
    assert opened(folder, "mmlu", IDENTITY, (0, 1), {}, ["a", "b"]).missing(4) == [3]
    with pytest.raises(UserError, match="row 1 of mmlu .* digest b, but .* has x: .*--out"):
        opened(folder, "mmlu", IDENTITY, (0, 1), {}, ["a", "x"])


def test_damaged_lines_are_named(folder, opened):
    opened(folder, "mmlu", IDENTITY, (0, 1)).add([_row(0)])
    path = folder / "mmlu.jsonl"
    good, more = path.read_text(), json.dumps(_row(1)) + "\n"
    for line in ("[]", "{", '{"index": "0", "right": true}', '{"right": true}', '{"index": 1}'):
        path.write_text(f"{good}{line}\n{more}")
        with pytest.raises(UserError, match=r"mmlu.jsonl, line 2 is damaged"):
            opened(folder, "mmlu", IDENTITY, (0, 1))


def test_reload(folder):
    one, other = (rows_lib.RowStore(folder, "mmlu", IDENTITY, (i, 2)) for i in range(2))
    other.add([_row(1)])
    one.add([_row(0)])
    assert one.done == {0: _row(0)}
    one.reload()
    assert one.done == {0: _row(0), 1: _row(1)}


def test_two_writers_of_the_same_rows_are_refused(folder):
    first = rows_lib.RowStore(folder, "mmlu", IDENTITY, (0, 1))
    with pytest.raises(UserError, match="another process writes these rows.*--share=I/N"):
        rows_lib.RowStore(folder, "mmlu", IDENTITY, (0, 1))
    first.close()
    rows_lib.RowStore(folder, "mmlu", IDENTITY, (0, 1)).close()


def test_write_errors_and_bad_days(folder, opened):
    """Messages name the file and the reason."""
    rows = opened(folder, "mmlu", IDENTITY, (0, 1))
    rows.path.mkdir()
    with pytest.raises(UserError, match="mmlu.jsonl cannot be written: Is a directory. Earlier"):
        rows.add([_row(0)])
    assert rows.done == {}
    (folder / ".gsm8k.lock").mkdir()
    with pytest.raises(UserError, match="/.gsm8k.lock cannot be written: Is a directory$"):
        opened(folder, "gsm8k", IDENTITY, (0, 1))
    (folder / "file").write_text("")
    with pytest.raises(UserError, match="file/mmlu.json cannot be written: File exists$"):
        opened(folder / "file", "mmlu", IDENTITY, (0, 1))
    for day in ("yesterday", 3):
        (folder / "gsm8k.json").write_text(json.dumps(dict(day=day)))
        with pytest.raises(UserError, match=f"gsm8k.json: day = {day!r} is not a date: remove"):
            rows_lib.day(folder)


def test_rows_in_a_bucket_are_written_anew(folder, monkeypatch):
    """Buckets have no appending, locks or truncation."""
    monkeypatch.setattr(rows_lib, "in_bucket", lambda path: True)
    one, other = (rows_lib.RowStore(folder, "mmlu", IDENTITY, (0, 1)) for _ in range(2))
    one.add([_row(0)])
    one.add([_row(1)])
    other.reload()
    assert other.done == {0: _row(0), 1: _row(1)} and one.path.read_bytes().count(b"\n") == 2
    one.path.write_bytes(one.path.read_bytes() + b"half")
    other.reload()
    assert one.path.read_bytes().endswith(b"half") and not (folder / ".mmlu.lock").exists()
    one.close()


def test_rows_without_an_identity_are_refused(folder, opened):
    opened(folder, "mmlu", IDENTITY, (0, 1)).add([_row(0)])
    (folder / "mmlu.json").unlink()
    with pytest.raises(UserError, match="mmlu.json is missing"):
        opened(folder, "mmlu", IDENTITY, (0, 1))


def test_flipped_bits_of_a_summary(tmp_path, capsys):
    folder = epath.Path(tmp_path)
    assert summary.read(folder) == {}
    path = summary.write(folder, dict(model=dict(step=8), tasks=dict(mmlu=dict(right=3, rows=5))))
    content, written = path.read_bytes(), summary.read(folder)
    assert written["tasks"] == dict(mmlu=dict(right=3, rows=5))
    for broken in damage.flipped(content, step=31):
        path.write_bytes(broken)
        found, warnings = summary.read(folder), capsys.readouterr().err
        assert found == written or (found == {} and "summary.json " in warnings), broken
    path.write_text(json.dumps(written))  # without a checksum, as in old files
    assert summary.read(folder) == written and not capsys.readouterr().err
