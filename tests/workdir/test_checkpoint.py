"""Checkpoints: what is saved comes back, damaged ones are set aside, configs are checked."""

import contextlib
import errno
import hashlib
import json
import logging
import pathlib
import random
import re
import shutil
import time
import types

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import config as config_lib
from kvjax.distributed import sharding
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.training import loop
from kvjax.training.program import Program
from kvjax.workdir import checkpoint, lineage, storage
from kvjax.workdir.checkpoint import CHECKPOINTS, Checkpoints, read_parameters
from kvjax.workdir.identity import check_identity, set_aside_earlier_run, write_identity
from tests import quick, runs


def state(value: float) -> dict:
    return dict(params={"w": jnp.full((64, 8), value), "segments": {0: {"b": jnp.arange(3.0)}}})


ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    state(0.0),
)


@pytest.fixture
def saved(tmp_path) -> epath.Path:
    """A workdir with checkpoints of steps 1, 2, 3, of which two are kept."""
    return save(epath.Path(tmp_path), steps=(1, 2, 3))


def save(workdir: epath.Path, steps: tuple[int, ...]) -> epath.Path:
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    for step in steps:
        checkpoints.save(step, state(float(step)), position=10 * step)
    checkpoints.close()
    return workdir


def restore(workdir):
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    try:
        return checkpoints.restore(ABSTRACT), checkpoints.steps()
    finally:
        checkpoints.close()


def test_the_latest_comes_back(saved):
    (restored, position, step), steps = restore(saved)
    assert (step, position, steps) == (3, 30, [2, 3])
    jax.tree.map(np.testing.assert_array_equal, restored, state(3.0))


def test_a_path_is_no_pattern(tmp_path, monkeypatch):
    """Whatever the workdir, its parent or the current folder is called, and what is beside it."""
    here = tmp_path / "cwd[1]"
    here.mkdir()
    monkeypatch.chdir(here)
    names = ("w[1]*{x}?", "[!a]/w", "[[]", "w1", "w*", "#%20 |")
    workdirs = [runtime.workdir(path) for name in names for path in (name, tmp_path / name)]
    for step, workdir in enumerate(workdirs, 1):
        save(workdir, steps=(step,))
    for step, workdir in enumerate(workdirs, 1):
        (restored, position, _), steps = restore(workdir)
        assert (position, steps) == (10 * step, [step]), workdir
        jax.tree.map(np.testing.assert_array_equal, restored, state(float(step)))


def test_nothing_there(tmp_path):
    assert restore(epath.Path(tmp_path)) == (None, [])


def array_files(step_directory: epath.Path) -> list[pathlib.Path]:
    files = [f for f in pathlib.Path(step_directory, "state").rglob("d/*") if f.is_file()]
    assert files
    return files


def corrupt(step_directory: epath.Path) -> None:
    """Overwrites every file that holds array data."""
    for file in array_files(step_directory):
        file.write_bytes(b"\0" * file.stat().st_size)


def remove(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty(path: pathlib.Path) -> None:
    for child in path.iterdir() if path.is_dir() else ():
        remove(child)
    if path.is_file():
        path.write_bytes(b"")


def halve(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def hollow(path: pathlib.Path) -> None:
    path.write_text("{}")


# Parts of a checkpoint without which it cannot be read, and damage to each.
NEEDED = [(".", empty), ("data", remove), ("data/_METADATA", empty), ("state/d", remove)]
NEEDED += [(part, how) for part in ("state", "state/_METADATA") for how in (remove, empty)]
NEEDED += [("state/manifest.ocdbt", how) for how in (remove, empty, halve)]
NEEDED += [("state/_METADATA", halve), ("state/_METADATA", hollow), (".", corrupt)]


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("parts", ["needed", pytest.param("all", marks=pytest.mark.slow)])
def test_a_damaged_part_is_noticed_or_harmless(saved, capfd, parts):
    """Reads a folder that an interrupted copy left: uses the step before, and a line says so."""
    latest, aside = saved / CHECKPOINTS / "3", saved / "unreadable-checkpoint-3"
    inside = sorted(pathlib.Path(latest).rglob("*"))
    damage = list(NEEDED)
    if parts == "all":
        damage += [(p.relative_to(latest), how) for p in inside for how in (remove, empty)]
        damage += [(p.relative_to(latest), halve) for p in inside if p.is_file()]
    shutil.copytree(latest, saved / "whole")
    for part, how in damage:
        how(pathlib.Path(latest, part))
        told = None
        try:
            params = read_parameters(saved / CHECKPOINTS, 3, abstract_parameters())
            jax.tree.map(np.testing.assert_array_equal, params, state(3.0)["params"])
        except UserError as error:
            told = str(error)
            assert re.search(
                r"/3 cannot be read (?s:.*)other checkpoints there: steps \[2\]$", told
            )
        (restored, position, step), steps = restore(saved)
        jax.tree.map(np.testing.assert_array_equal, restored, state(float(step)))
        lines = capfd.readouterr().err.splitlines()
        if step == 2:
            assert (position, steps) == (20, [2]) and aside.exists(), part  # nothing is lost
            assert len(lines) == 2 and "going on from step 2; step 3 was moved" in lines[1]
            assert lines[0].startswith("WARNING: checkpoint of step 3 cannot be read"), part
            if how is corrupt:  # of all that TensorStore says: the array, and what is wrong
                assert re.search(
                    r'read: DATA_LOSS: params\.[\w.]+: Error decoding [^\["]+$', lines[0]
                )
            shutil.rmtree(aside)
        else:
            assert (part, how) not in NEEDED and not told and not lines, part
            shutil.rmtree(latest)
        shutil.copytree(saved / "whole", latest)


def test_none_can_be_read(saved):
    for step in ("2", "3"):
        corrupt(saved / CHECKPOINTS / step)
    with pytest.raises(UserError, match="no checkpoint can be read.*step 3.*step 2"):
        restore(saved)
    assert (saved / CHECKPOINTS / "3").exists()


def names(folder: epath.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "error",
    quick.every(
        4,
        [
            OSError(errno.EIO, "Input/output error"),
            PermissionError(errno.EACCES, "Permission denied"),
            MemoryError("no room"),
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"),
            ValueError('UNKNOWN: Error reading local file "d/1": Input/output error'),
            ValueError('PERMISSION_DENIED: Error opening local file "d/1": Permission denied'),
            ConnectionResetError("the network"),
        ],
    ),
    ids=lambda error: f"{type(error).__name__}-{str(error)[:7]}",
)
def test_what_is_no_damage_stops_with_its_reason(saved, monkeypatch, error):
    def load(path, abstract):
        try:
            raise error
        except Exception as cause:
            raise ValueError("Orbax says") from cause

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", load)
    before = names(saved / CHECKPOINTS)
    with pytest.raises(UserError, match="3 was not loaded: .*nothing was changed") as caught:
        restore(saved)
    assert str(error).rpartition(": ")[2] in str(caught.value)
    assert names(saved / CHECKPOINTS) == before == {"2", "3"}
    assert names(saved) == {CHECKPOINTS}


def test_folders_that_cannot_be_listed_are_no_damage(saved, monkeypatch):
    def load(path, abstract):
        raise FileNotFoundError(f"{path}/state is not there")

    def iterdir(path, real=type(saved).iterdir):
        if path.name == "state":
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", load)
    monkeypatch.setattr(type(saved), "iterdir", iterdir)
    with pytest.raises(UserError, match="3 was not loaded: OSError: .*Input/output error"):
        restore(saved)
    assert names(saved / CHECKPOINTS) == {"2", "3"} and names(saved) == {CHECKPOINTS}


@pytest.mark.parametrize("leaf", [dict(w=(64, 9)), dict(v=(3,))], ids=["shape", "name"])
def test_other_arrays_are_no_damage(saved, leaf):
    other = dict(params=abstract_parameters(**leaf))
    checkpoints = Checkpoints(saved / CHECKPOINTS, keep=2)
    with pytest.raises(UserError, match=r"checkpoints/3 holds another model(?s:.*)config \("):
        checkpoints.restore(other)
    checkpoints.close()
    assert names(saved / CHECKPOINTS) == {"2", "3"}


def test_what_was_set_aside_before_stays_and_its_step_is_free(saved):
    before = saved / "unreadable-checkpoint-3"
    before.mkdir()
    (before / "note").write_text("mine")
    corrupt(saved / CHECKPOINTS / "3")
    assert restore(saved)[0][2] == 2
    assert (before / "note").read_text() == "mine"
    assert names(saved / "unreadable-checkpoint-3-2") >= {"state", "data"}
    again = Checkpoints(saved / CHECKPOINTS, keep=2)
    again.save(3, state(33.0), position=30)
    again.close()
    assert restore(saved)[0][2] == 3


def test_checkpoints_whose_names_were_swapped(tmp_path):
    folder = epath.Path(tmp_path) / CHECKPOINTS
    checkpoints = Checkpoints(folder, keep=2)
    for step in (4, 5):
        checkpoints.save(step, state(float(step)) | dict(step=jnp.int32(step)), position=0)
    checkpoints.close()
    (folder / "4").rename(folder / "x")
    (folder / "5").rename(folder / "4")
    (folder / "x").rename(folder / "5")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = ABSTRACT | dict(step=jax.ShapeDtypeStruct((), jnp.int32, sharding=one))
    checkpoints = Checkpoints(folder, keep=2)
    with pytest.raises(UserError, match=r"checkpoints/5 holds step 4: .* the name 4 again"):
        checkpoints.restore(abstract)
    checkpoints.close()
    with pytest.raises(UserError, match=r"checkpoints/4 holds step 5: .* the name 5 again"):
        read_parameters(folder, 4, abstract_parameters())
    assert names(folder) == {"4", "5"}


@pytest.fixture(scope="module")
def trained_state(tmp_path_factory):
    """A function of a step: a real state, of a model too small to train; and its abstract one."""
    config = runs.small_config("none", str(tmp_path_factory.mktemp("data")))
    run = config_lib.resolve(config)
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    program = Program(run, run.compute.resolve("cpu", run.model.block.num_layers), mesh)
    state = program.init(jax.random.key(0))

    def at(step):
        def moved(x):
            return x + x.dtype.type(step) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(moved, state) | dict(step=jnp.full_like(state["step"], step))

    return at, program.abstract_state


@pytest.mark.slow
def test_the_shapes_of_a_real_state(trained_state, tmp_path):
    at, abstract = trained_state
    folder = epath.Path(tmp_path) / "100% of it"
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, at(1), position=8)
    checkpoints.close()
    there = storage.shapes(folder / "1" / "state")
    assert there == storage.shapes_of(abstract) and len(there) > 20


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("flips", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_flipped_bits_are_noticed_or_harmless(trained_state, tmp_path, capfd, flips):
    """Either the step before is used and a line says so, or what is loaded is equal."""
    at, abstract = trained_state
    workdir = epath.Path(tmp_path)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    for step in (1, 2):
        checkpoints.save(step, at(step), position=8 * step)
    checkpoints.close()
    latest, rng = tmp_path / CHECKPOINTS / "2", random.Random(flips)
    files = sorted(path for path in latest.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    noticed = 0
    for i in range(flips):
        weights = sizes if i % 2 else None  # by bytes, and every file alike
        file = rng.choices(files, weights)[0]
        whole = file.read_bytes()
        broken = bytearray(whole)
        broken[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(broken)
        try:
            params = read_parameters(workdir / CHECKPOINTS, 2, abstract["params"])
            jax.tree.map(np.testing.assert_array_equal, params, at(2)["params"])
        except UserError as error:
            assert "checkpoints/2 cannot be read" in str(error)
        checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
        state, position, step = checkpoints.restore(abstract)
        checkpoints.close()
        assert position == 8 * step
        jax.tree.map(np.testing.assert_array_equal, state, at(step))
        told = capfd.readouterr().err
        if step == 1:
            noticed += 1
            assert told.count("\n") == 2 and "step 2 cannot be read" in told
            (tmp_path / "unreadable-checkpoint-2").rename(latest)
        else:
            assert step == 2 and not told
        file.write_bytes(whole)
    assert noticed > flips // 3


def test_checkpoints_without_checksums_still_load(saved, monkeypatch):
    tu = storage.tensorstore_utils
    monkeypatch.setattr(tu, "_build_zarr3_metadata", tu._build_zarr3_metadata.__wrapped__)
    checkpoints = Checkpoints(saved / CHECKPOINTS, keep=2)
    checkpoints.save(4, state(4.0), position=40)
    checkpoints.close()
    monkeypatch.undo()
    (restored, position, step), steps = restore(saved)
    assert (step, position, steps) == (4, 40, [3, 4])
    jax.tree.map(np.testing.assert_array_equal, restored, state(4.0))


# Changes to the folder of a run, and what is said of each.
MOVED = {
    "move": "was moved to {top}/new while .*with --workdir={top}/new goes on from step 4$",
    "move above": "was moved to {top}-new/run while .*={top}-new/run goes on from step 4$",
    "replace": "was moved to {top}/new while .*={top}/new goes on from step 4$",
    "remove": "was moved or removed while .*The same command begins anew",
    "link elsewhere": "was moved to {top}/run while .*={top}/run goes on from step 4$",
}


def test_a_workdir_that_is_moved_or_removed_is_noticed(saved, tmp_path_factory):
    """Refuses to save the next checkpoint, and makes no folder in its place."""
    for change, said in MOVED.items():
        _check_moved(saved, pathlib.Path(tmp_path_factory.mktemp("top")), change, said)


def _check_moved(saved: epath.Path, top: pathlib.Path, change: str, said: str) -> None:
    workdir = top / "run"
    shutil.copytree(saved, workdir)
    if change == "link elsewhere":
        (top / "link").symlink_to(workdir)
        workdir = top / "link"
    checkpoints = Checkpoints(epath.Path(workdir) / CHECKPOINTS, keep=2)
    assert not checkpoints.is_moved()
    if change == "move above":
        top.rename(f"{top}-new")
    elif change == "remove":
        shutil.rmtree(workdir)
    elif change == "link elsewhere":
        workdir.unlink()
        workdir.symlink_to(saved)
    else:
        workdir.rename(top / "new")
    if change == "replace":
        workdir.mkdir()
    assert checkpoints.is_moved()
    with pytest.raises(UserError, match=said.format(top=top)) as told:
        checkpoints.save(4, state(4.0), position=40)
    assert str(told.value).startswith(f"{workdir} was moved")
    checkpoints.close()
    now = re.search("was moved to (.*) while", str(told.value))
    said = "saved there. The" if now else "not saved. The"
    assert f"stopped at step 4, which was {said}" in str(told.value)
    if now:
        (restored, position, step), steps = restore(epath.Path(now[1]))
        assert (step, position, steps) == (4, 40, [3, 4])
        jax.tree.map(np.testing.assert_array_equal, restored, state(4.0))
    if change == "link elsewhere":
        assert storage.steps(saved / CHECKPOINTS) == [2, 3]
    else:  # nothing is made in its place
        assert not workdir.exists() or (change == "replace" and not list(workdir.iterdir()))


def test_a_save_outlives_a_wall_clock_that_jumps(saved, monkeypatch):
    real, begun = time.time, time.monotonic()
    checkpoints = Checkpoints(saved / CHECKPOINTS, keep=2)
    monkeypatch.setattr(
        time, "time", lambda: real() + 10_000 * int((time.monotonic() - begun) / 0.01)
    )
    for step in (4, 5, 6):
        checkpoints.save(step, state(float(step)), position=10 * step)
    checkpoints.close()
    monkeypatch.undo()
    assert restore(saved)[0][1:] == (60, 6)


def test_last_words_about_a_bucket(saved, monkeypatch):
    """Nothing is asked of the bucket: this is said while a process is aborted."""
    checkpoints = Checkpoints(saved / CHECKPOINTS, keep=2)
    checkpoints.directory = epath.Path("gs://bucket/run/checkpoints")
    there = "are in gs://bucket/run/checkpoints. "
    assert checkpoints.describe() == f"Checkpoints of steps [2, 3] {there}"
    checkpoints.directory = saved / CHECKPOINTS
    checkpoints.save(4, state(4.0), position=40)
    checkpoints.wait()
    checkpoints.directory = epath.Path("gs://bucket/run/checkpoints")
    assert checkpoints.describe() == f"Checkpoints of steps [3, 4] {there}"
    checkpoints.close()


def test_half_written_checkpoints_are_not_found(saved):
    unfinished = saved / CHECKPOINTS / "4.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    assert restore(saved)[0][2] == 3


def abstract_parameters(dtype=jnp.float32, **shapes):
    """The saved parameters' shapes, some replaced, on another device than they were saved from."""
    device = jax.devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = {"w": (64, 8), "segments": {0: {"b": (3,)}}} | shapes
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def test_parameters_alone(tmp_path):
    """Beside an optimizer state of which nothing is asked."""
    workdir = epath.Path(tmp_path)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(float(step)) | {"optimizer": jnp.ones(5)}, position=0)
    checkpoints.close()
    params = read_parameters(workdir / CHECKPOINTS, 1, abstract_parameters(jnp.bfloat16))
    assert params["w"].dtype == jnp.bfloat16 and params["w"].devices() == {jax.devices()[-1]}
    want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state(1.0)["params"])
    jax.tree.map(np.testing.assert_array_equal, params, want)


def test_parameters_of_another_model(saved):
    advice = "\nGive the workdir that it was trained in, with its config.json as it was"
    more = {f"x{i}": (i, 1) for i in range(9)}

    def none(name, shape):
        return f"{name}: checkpoint none, config {shape}"

    rows_of_more = [none(*item) for item in more.items()]

    for others, rows in (
        (dict(w=(64, 9), v=(1,)), [none("v", (1,)), "w: checkpoint (64, 8), config (64, 9)"]),
        ({k: x for k, x in more.items() if k != "x8"}, rows_of_more[:8]),
        (more, [*rows_of_more[:8], "and 1 more"]),
    ):
        with pytest.raises(UserError) as error:
            checkpoint.check_parameters(saved / CHECKPOINTS, 3, abstract_parameters(**others))
        lines = "".join(f"\n  {row}" for row in rows)
        holds = f"{saved}/checkpoints/3 holds another model than the config describes:"
        assert str(error.value) == holds + lines + advice
    without = dict(w=abstract_parameters()["w"])
    with pytest.raises(UserError, match=r"  segments.0.b: checkpoint \(3,\), config none\n"):
        read_parameters(saved / CHECKPOINTS, 3, without)


def test_a_save_that_fails_is_told_and_the_next_one_works(saved, monkeypatch):
    """At once, or while it is written. The folder is opened anew, which removes what was left; of
    several processes, others may still be writing."""
    checkpoints = Checkpoints(saved / CHECKPOINTS, keep=2)

    def fails(*args, **keys):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fails_later(*args, **keys):
        return types.SimpleNamespace(result=fails, on_complete=lambda done: None)

    told = "^checkpoint of step 4 was not written: OSError: .*No space left on device$"
    for save_async, count in ((fails, 1), (fails_later, 1), (fails, 2)):
        opened = checkpoints._checkpointer
        monkeypatch.setattr(checkpoint.distributed, "count", lambda count=count: count)
        monkeypatch.setattr(opened, "save_checkpointables_async", save_async)
        with pytest.raises(OSError, match=told):
            checkpoints.save(4, state(4.0), position=40)
            checkpoints.wait()
        assert (checkpoints._checkpointer is opened) == (count == 2)
        assert checkpoints.steps() == [2, 3]
    monkeypatch.undo()
    checkpoints.save(4, state(4.0), position=40)
    checkpoints.close()
    assert restore(saved)[0][1:] == (40, 4)


def test_one_process_reads_without_others_and_counts_as_they_do(monkeypatch):
    """Orbax waits for all of them, by numbers of what each has done."""
    asked, counter = [], storage.synchronization.OperationIdGenerator
    done = int(counter.get_current_operation_id())

    def gather(name, value):
        asked.append((name, value))
        return [value, str(done + 3), str(done + 1)]

    monkeypatch.setattr(storage.distributed, "gather", gather)
    for _ in range(2):
        storage.align_operation_ids()
        assert counter.get_current_operation_id() == str(done + 3)
    assert asked == [("operations", str(done)), ("operations", str(done + 3))]
    monkeypatch.setattr(storage.distributed, "index", lambda: 2)
    for count, process, prefix in ((1, 0, None), (3, 2, "alone2")):
        monkeypatch.setattr(storage.distributed, "count", lambda count=count: count)
        found = storage.single_process_context().multiprocessing
        only = None if count == 1 else {process}
        assert (found.primary_host, found.active_processes) == (process, only)
        assert found.barrier_sync_key_prefix == prefix


def test_only_what_orbax_raises_as_well_is_left_out_of_its_log():
    def raised(file, error):
        try:
            exec(compile("raise error", file, "exec"), dict(error=error))
        except Exception as caught:
            return type(caught), caught, caught.__traceback__

    told = []
    for file, text, left_out in (
        ("/lib/orbax/x.py", "disk", True),
        ("/lib/other/x.py", "disk", False),
        ("/lib/other/x.py", "Event loop is closed", True),
        ("/lib/other/x.py", "Event loop is closed now", False),
    ):
        _, error, trace = raised(file, OSError(text))
        what = types.SimpleNamespace(exc_value=error, exc_traceback=trace)
        storage._without_orbax(told.append, what)
        assert told == ([] if left_out else [what])
        told.clear()
    of_orbax, other = (raised(f"/lib/{name}/x.py", OSError("disk")) for name in ("orbax", "other"))
    for path, text, trace, left_out in (
        ("/lib/x.py", "a", None, False),
        ("/lib/tensorstore/x.py", "a", None, True),
        ("/lib/x.py", "orbax", None, True),
        ("/lib/x.py", "a", other, False),
        ("/lib/x.py", "a", of_orbax, True),
    ):
        record = logging.LogRecord("absl", logging.ERROR, path, 1, text, (), trace)
        for name in ("absl", "asyncio"):
            assert bool(logging.getLogger(name).filter(record)) != left_out


def test_listing_steps_changes_nothing(saved):
    unfinished = saved / CHECKPOINTS / "4.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)

    def listing():
        return sorted(pathlib.Path(saved).rglob("*"))

    before = listing()
    assert storage.steps(saved / CHECKPOINTS) == [2, 3]
    assert listing() == before
    assert storage.steps(saved / "nowhere") == [] and not (saved / "nowhere").exists()


def test_a_parent_is_told_by_its_parameters(tmp_path, monkeypatch):
    """Whatever else its checkpoint holds, and in however many pieces it is read."""
    workdir = epath.Path(tmp_path)
    params = {"w": np.arange(15.0, dtype=np.float32).reshape(5, 3), "a": {"s": np.float32(7)}}
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=1)
    checkpoints.save(4, dict(params=jax.tree.map(jnp.asarray, params), n=jnp.ones(2)), position=0)
    checkpoints.close()
    told = hashlib.sha256(b"params.a.s () float32\n" + params["a"]["s"].tobytes())
    told.update(b"params.w (5, 3) float32\n" + params["w"].tobytes())
    for block in (1, 24, 1 << 28):
        monkeypatch.setattr(lineage, "_READ_BYTES", block)
        lineage.write(workdir, epath.Path("/parent"), workdir / CHECKPOINTS, 4)
        text = (workdir / lineage.PARENT).read_text()
        expected = dict(workdir="/parent", step=4, sha256=told.hexdigest())
        assert text == json.dumps(expected, indent=1) + "\n"
    for _ in range(2):
        lineage.remove(workdir)
        assert not (workdir / lineage.PARENT).exists()


def test_another_identity_is_told_by_what_differs(saved):
    path = saved / "config.json"
    with pytest.raises(UserError, match=r"has checkpoints and no config\.json"):
        check_identity(path, {"model": {"rank": 16, "dim": 32}, "name": "a"})
    write_identity(path, {"model": {"rank": 16, "dim": 32}, "name": "a"})
    before = path.read_bytes()
    check_identity(path, {"model": {"rank": 16, "dim": 32}, "name": "a"})
    with pytest.raises(UserError, match=r"model\.rank: there 16, now 8") as error:
        check_identity(path, {"model": {"rank": 8, "dim": 32}, "name": "a"})
    assert "dim" not in str(error.value) and path.read_bytes() == before


def test_an_identity_binds_only_where_there_are_checkpoints(saved, tmp_path):
    """Files of a killed first save are no checkpoint."""
    path = epath.Path(tmp_path) / "another" / "config.json"
    (path.parent / CHECKPOINTS / "10.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    for workdir, binds in ((path.parent, False), (saved, True)):
        write_identity(workdir / path.name, {"rank": 16})
        told = pytest.raises(UserError) if binds else contextlib.nullcontext()
        with told:
            check_identity(workdir / path.name, {"rank": 8})


def leave_a_run(workdir: epath.Path) -> dict[str, str]:
    """Files as of a run, with their names as content."""
    files = ["config.json", "dataset.json", "metrics.jsonl", "timing.jsonl", "events/events.1"]
    files += ["chat_template.jinja", "context.json"]  # of what it started from
    (workdir / "events").mkdir(parents=True, exist_ok=True)
    for name in files:
        (workdir / name).write_text(name)
    return {name: name for name in files}


@pytest.mark.parametrize("where", ["local", "gs://"])
def test_a_run_without_checkpoints_is_set_aside(tmp_path, bucket, capsys, where):
    (bucket / "runs").mkdir()
    workdir = epath.Path("gs://runs/one") if where == "gs://" else epath.Path(tmp_path) / "one"
    workdir.mkdir()
    set_aside_earlier_run(workdir)
    assert not capsys.readouterr().err
    files = leave_a_run(workdir)
    (workdir / "mine.txt").write_text("notes")
    for number in ("", "-2"):
        set_aside_earlier_run(workdir)
        target = workdir / f"earlier-run{number}"
        assert {name: (target / name).read_text() for name in files} == files
        assert capsys.readouterr().err.startswith(f"WARNING: {workdir} has records of a run")
        set_aside_earlier_run(workdir)  # nothing is left to move
        assert not capsys.readouterr().err and (workdir / "mine.txt").exists()
        leave_a_run(workdir)


def test_nothing_of_a_run_with_checkpoints_is_moved(saved):
    files = leave_a_run(saved)
    set_aside_earlier_run(saved)
    assert {name: (saved / name).read_text() for name in files} == files


def test_removing_checkpoints_loses_no_record(tmp_path, monkeypatch):
    """Not even of another config; this run gets as far as to its data."""
    workdir = epath.Path(tmp_path) / "run"
    files = leave_a_run(workdir)
    (workdir / CHECKPOINTS / "10.orbax-checkpoint-tmp").mkdir(parents=True)

    def prepared(data, hours, **keys):
        raise UserError("far enough")

    monkeypatch.setattr(loop.preflight, "prepare_dataset", prepared)
    config = runs.small_config(runs.write_text(tmp_path / "text.txt"), str(tmp_path / "data"))
    with pytest.raises(UserError, match="far enough"):
        loop.train(config, workdir)
    assert {name: (workdir / "earlier-run" / name).read_text() for name in files} == files
    assert not any((workdir / name).exists() for name in files)
