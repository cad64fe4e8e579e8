"""Checkpoints round-trip; damaged ones are set aside, and other failures change nothing."""

import errno
import pathlib
import random
import re
import shutil
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
from kvjax.training.program import Program
from kvjax.workdir import checkpoint, storage
from kvjax.workdir.checkpoint import CHECKPOINTS, Checkpoints, read_parameters
from tests import quick, runs


def read_in_threads(directory, step, abstract):
    return checkpoint.start_reading(directory, step, abstract)()


READERS = (read_parameters, read_in_threads)


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
    """A workdir that saved steps 1, 2, 3 and keeps two of them."""
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
    """Brackets and wildcards in a folder's path or in its siblings' names are literal."""
    folder = tmp_path / "cwd[1]"
    folder.mkdir()
    monkeypatch.chdir(folder)
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


# Necessary parts of a checkpoint, and damage to each.
NEEDED = [(".", empty), ("data", remove), ("data/_METADATA", empty), ("state/d", remove)]
NEEDED += [(part, how) for part in ("state", "state/_METADATA") for how in (remove, empty)]
NEEDED += [("state/manifest.ocdbt", how) for how in (remove, empty, halve)]
NEEDED += [("state/_METADATA", halve), ("state/_METADATA", hollow), (".", corrupt)]


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("parts", ["needed", pytest.param("all", marks=pytest.mark.slow)])
def test_a_damaged_part_is_noticed_or_harmless(saved, capfd, parts):
    """After an interrupted copy the previous step is restored, with a warning of two lines."""
    latest, renamed = saved / CHECKPOINTS / "3", saved / "unreadable-checkpoint-3"
    inside = sorted(pathlib.Path(latest).rglob("*"))
    damage = list(NEEDED)
    if parts == "all":
        damage += [
            (p.relative_to(latest), damage_part) for p in inside for damage_part in (remove, empty)
        ]
        damage += [(p.relative_to(latest), halve) for p in inside if p.is_file()]
    shutil.copytree(latest, saved / "whole")
    for part, damage_part in damage:
        damage_part(pathlib.Path(latest, part))
        message = None
        for read in READERS:
            try:
                params = read(saved / CHECKPOINTS, 3, abstract_parameters())
                jax.tree.map(np.testing.assert_array_equal, params, state(3.0)["params"])
            except UserError as error:
                message = str(error)
                assert re.search(
                    r"/3 cannot be read (?s:.*)other checkpoints there: steps \[2\]$", message
                )
        (restored, position, step), steps = restore(saved)
        jax.tree.map(np.testing.assert_array_equal, restored, state(float(step)))
        lines = capfd.readouterr().err.splitlines()
        if step == 2:
            assert (position, steps) == (20, [2]) and renamed.exists(), part  # nothing is lost
            assert len(lines) == 2 and "going on from step 2; step 3 was moved" in lines[1]
            assert lines[0].startswith("WARNING: checkpoint of step 3 cannot be read"), part
            if damage_part is corrupt:  # names the array and the fault only
                assert re.search(
                    r'read: DATA_LOSS: params\.[\w.]+: Error decoding [^\["]+$', lines[0]
                )
            shutil.rmtree(renamed)
        else:
            assert (part, damage_part) not in NEEDED and not message and not lines, part
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
def test_other_failures_change_nothing(saved, monkeypatch, error):
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


def test_unlistable_folders_are_no_damage(saved, monkeypatch):
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


def test_a_second_damaged_checkpoint_gets_another_name(saved):
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


@pytest.fixture(scope="module")
def trained_state(tmp_path_factory):
    """Returns (step -> state of a tiny model, the abstract state)."""
    config = runs.small_config("none", str(tmp_path_factory.mktemp("data")))
    run = config_lib.resolve(config)
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    program = Program(run, run.compute.resolve("cpu", run.model.block.num_layers), mesh)
    state = program.init(jax.random.key(0))

    def state_of(step):
        def shifted(x):
            return x + x.dtype.type(step) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(shifted, state) | dict(step=jnp.full_like(state["step"], step))

    return state_of, program.abstract_state


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("flips", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_flipped_bits_are_noticed_or_harmless(trained_state, tmp_path, capfd, flips):
    """A flip either restores the previous step with a warning, or changes no loaded number."""
    state_of, abstract = trained_state
    workdir = epath.Path(tmp_path)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state_of(step), position=8 * step)
    checkpoints.close()
    latest, rng = tmp_path / CHECKPOINTS / "2", random.Random(flips)
    files = sorted(path for path in latest.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    noticed = 0
    for i in range(flips):
        weights = sizes if i % 2 else None  # by bytes, and every file alike
        file = rng.choices(files, weights)[0]
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        for read in READERS:
            try:
                params = read(workdir / CHECKPOINTS, 2, abstract["params"])
                jax.tree.map(np.testing.assert_array_equal, params, state_of(2)["params"])
            except UserError as error:
                assert "checkpoints/2 cannot be read" in str(error)
        checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
        state, position, step = checkpoints.restore(abstract)
        checkpoints.close()
        assert position == 8 * step
        jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
        warning = capfd.readouterr().err
        if step == 1:
            noticed += 1
            assert warning.count("\n") == 2 and "step 2 cannot be read" in warning
            (tmp_path / "unreadable-checkpoint-2").rename(latest)
        else:
            assert step == 2 and not warning
        file.write_bytes(content)
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


def abstract_parameters(dtype=jnp.float32, **shapes):
    """Returns abstract parameters, some of other shapes, on another device than the saved ones."""
    device = jax.devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = {"w": (64, 8), "segments": {0: {"b": (3,)}}} | shapes
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize("read", READERS)
def test_parameters_alone(tmp_path, read):
    """Parameters load without the optimizer state, in another dtype."""
    workdir = epath.Path(tmp_path)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(float(step)) | {"optimizer": jnp.ones(5)}, position=0)
    checkpoints.close()
    params = read(workdir / CHECKPOINTS, 1, abstract_parameters(jnp.bfloat16))
    assert params["w"].dtype == jnp.bfloat16 and params["w"].devices() == {jax.devices()[-1]}
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state(1.0)["params"])
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_readers_agree_bit_for_bit(tmp_path, dtype):
    """Casts round equally, and NaN and infinity survive."""
    w = jax.random.normal(jax.random.key(0), (64, 8)).at[0, :3].set([jnp.nan, jnp.inf, 1e-40])
    params = {"w": w, "segments": {0: {"b": jnp.array([1 + 2**-8, 1 + 3 * 2**-8, 3e38])}}}
    checkpoints = Checkpoints(epath.Path(tmp_path), keep=1)
    checkpoints.save(1, {"params": params}, position=0)
    checkpoints.close()
    slow, fast = (read(epath.Path(tmp_path), 1, abstract_parameters(dtype)) for read in READERS)
    jax.tree.map(
        lambda x, y: x.tobytes() == y.tobytes() or pytest.fail(), *map(jax.device_get, (slow, fast))
    )
    assert jax.tree.map(lambda x: x.sharding, slow) == jax.tree.map(lambda x: x.sharding, fast)


@pytest.mark.parametrize("read", READERS)
def test_parameters_of_another_model(saved, read):
    """The message lists eight differing arrays, and counts the others."""
    more = {f"x{i}": (i, 1) for i in range(9)}
    rows = [f"  x{i}: checkpoint none, config {(i, 1)}" for i in range(8)]
    for others, expected in (
        (dict(w=(64, 9)), ["  w: checkpoint (64, 8), config (64, 9)"]),
        ({name: more[name] for name in list(more)[:8]}, rows),
        (more, [*rows, "  and 1 more"]),
    ):
        with pytest.raises(UserError, match="holds another model than the config") as error:
            checkpoint.check_parameters(saved / CHECKPOINTS, 3, abstract_parameters(**others))
        assert str(error.value).splitlines()[1:-1] == expected
    without = dict(w=abstract_parameters()["w"])
    with pytest.raises(UserError, match=r"  segments.0.b: checkpoint \(3,\), config none\n"):
        read(saved / CHECKPOINTS, 3, without)


def test_a_failed_save_is_reported_and_the_next_one_works(saved, monkeypatch):
    """A save may fail at once or later; one process reopens the folder, to remove partial files."""
    checkpoints = Checkpoints(saved / CHECKPOINTS, keep=2)

    def fails(*args, **keys):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fails_later(*args, **keys):
        return types.SimpleNamespace(result=fails, on_complete=lambda done: None)

    message = "^checkpoint of step 4 was not written: OSError: .*No space left on device$"
    for save_async, count in ((fails, 1), (fails_later, 1), (fails, 2)):
        opened = checkpoints._checkpointer
        monkeypatch.setattr(checkpoint.distributed, "count", lambda count=count: count)
        monkeypatch.setattr(opened, "save_checkpointables_async", save_async)
        with pytest.raises(OSError, match=message):
            checkpoints.save(4, state(4.0), position=40)
            checkpoints.wait()
        assert (checkpoints._checkpointer is opened) == (count == 2)
        assert checkpoints.steps() == [2, 3]
    monkeypatch.undo()
    checkpoints.save(4, state(4.0), position=40)
    checkpoints.close()
    assert restore(saved)[0][1:] == (40, 4)
