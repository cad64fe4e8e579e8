"""Orbax's patches, its contexts for one of several processes, and listing of steps."""

import logging
import pathlib
import types

from etils import epath

from kvjax.workdir import storage


def test_one_process_reads_without_others_and_counts_as_they_do(monkeypatch):
    """Orbax names barriers by a counter, which a failed load leaves behind in some processes."""
    gathered, counter = [], storage.synchronization.OperationIdGenerator
    done = int(counter.get_current_operation_id())

    def gather(name, value):
        gathered.append((name, value))
        return [value, str(done + 3), str(done + 1)]

    monkeypatch.setattr(storage.distributed, "gather", gather)
    for _ in range(2):
        storage.align_operation_ids()
        assert counter.get_current_operation_id() == str(done + 3)
    assert gathered == [("operations", str(done)), ("operations", str(done + 3))]
    monkeypatch.setattr(storage.distributed, "index", lambda: 2)
    for count, process, prefix in ((1, 0, None), (3, 2, "alone2")):
        monkeypatch.setattr(storage.distributed, "count", lambda count=count: count)
        options = storage.single_process_context().multiprocessing
        active = None if count == 1 else {process}
        assert (options.primary_host, options.active_processes) == (process, active)
        assert options.barrier_sync_key_prefix == prefix


def test_orbax_failures_are_not_logged_beside_their_exception():
    def raised(file, error):
        try:
            exec(compile("raise error", file, "exec"), dict(error=error))
        except Exception as caught:
            return type(caught), caught, caught.__traceback__

    kept = []
    for file, text, is_kept in (
        ("/lib/orbax/x.py", "disk", False),
        ("/lib/other/x.py", "disk", True),
        ("/lib/other/x.py", "Event loop is closed", False),
    ):
        kind, error, trace = raised(file, OSError(text))
        unraisable = types.SimpleNamespace(exc_value=error, exc_traceback=trace)
        kept.clear()
        storage._drop_orbax_errors(kept.append, unraisable)
        assert bool(kept) == is_kept
        if text == "disk":
            record = logging.LogRecord(
                "absl", logging.ERROR, "x.py", 1, "a", (), (kind, error, trace)
            )
            assert bool(logging.getLogger("absl").filter(record)) == is_kept
    for path, text, is_kept in (
        ("/lib/x.py", "a", True),
        ("/lib/tensorstore/x.py", "a", False),
        ("/lib/x.py", "orbax", False),
    ):
        record = logging.LogRecord("asyncio", logging.ERROR, path, 1, text, (), None)
        assert bool(logging.getLogger("asyncio").filter(record)) == is_kept


def test_listing_steps_changes_nothing(tmp_path):
    """Neither partial checkpoints nor missing folders count, and both stay as they are."""
    for name in ("2", "3", "4.orbax-checkpoint-tmp/state"):
        (tmp_path / name).mkdir(parents=True)
    before = sorted(pathlib.Path(tmp_path).rglob("*"))
    assert storage.steps(epath.Path(tmp_path)) == [2, 3]
    assert storage.steps(epath.Path(tmp_path) / "nowhere") == []
    assert sorted(pathlib.Path(tmp_path).rglob("*")) == before
