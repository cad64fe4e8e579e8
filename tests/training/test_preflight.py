"""What is checked before a run begins: memory, mesh, workdir; of processes: test_multihost.py."""

import json
import pathlib
import random
import shutil
import types

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tables.parameter_table import load_config
import kvjax
from kvjax import experiment as experiment_lib
from kvjax.data import loader
from kvjax.data import manifest
from kvjax.data import prepare
from kvjax.distributed import sharding
from kvjax.foundation import runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import UserError
from kvjax.training import loop
from kvjax.training import memory_estimate
from kvjax.training import preflight
from kvjax.workdir import identity
from tests import runs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return runs.write_text(folder / "text.txt"), str(folder / "data")


def test_memory_is_checked_before_anything_is_allocated(tmp_path):
    with pytest.raises(UserError) as error:
        loop.train(load_config(CONFIGS / "lrkv_2p5b.py"), epath.Path(tmp_path / "run"))
    message = str(error.value)
    for part in ("parameters", "optimizer", "gradients", "activations", "needed", "available"):
        assert part in message
    assert "1.2 GB" in message and "configs/lrkv_tiny.py" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("platform, part", [("cpu", 1.0), ("gpu", 0.8), ("tpu", 0.8)])
def test_what_is_close_is_left_to_an_accelerators_compiler(monkeypatch, platform, part):
    """There is a fifth less than the estimate; a CPU has no one to ask."""
    run = experiment_lib.resolve(load_config(CONFIGS / "lrkv_128m.py"))
    compute = run.compute.resolve(platform, run.model.block.num_layers)
    shape = dict(data=2, fsdp=4, sequence=1, tensor=2)
    device = types.SimpleNamespace(platform=platform, device_kind="a chip")
    mesh = types.SimpleNamespace(shape=shape, size=16, devices=np.array([device]))
    need = memory_estimate.estimate(
        run.model,
        compute,
        rows_per_device=run.train.batch_size // 8,
        sequence_length=2048,
        fsdp=4,
        tensor=2,
        attention_kernel=platform != "cpu",
    ).total
    monkeypatch.setattr(runtime, "memory_per_device", lambda: round(part * need) + 1)
    preflight.check_memory(run, compute, mesh)
    monkeypatch.setattr(runtime, "memory_per_device", lambda: round(part * need) - 10**6)
    with pytest.raises(UserError, match=f"(?s)does not fit on 16 x a chip.*{need / 1e9:.1f} GB"):
        preflight.check_memory(run, compute, mesh)


def test_batches_must_divide_over_devices(source):
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, sequence=2), jax.devices()[:8])
    experiment = experiment_lib.resolve(runs.small_config(*source, batch_size=6))
    with pytest.raises(UserError, match=r"batch_size = 6 .* fsdp = 4; use a .* of 4: 4 or 8"):
        preflight.check_mesh(experiment, mesh)
    two = experiment_lib.resolve(runs.small_config(*source, batch_size=4, grad_accumulation=2))
    with pytest.raises(UserError, match=r"2 part\(s\) is 2 rows a part.* multiple of 8: 8$"):
        preflight.check_mesh(two, mesh)
    preflight.check_mesh(experiment_lib.resolve(runs.small_config(*source, batch_size=4)), mesh)


@pytest.mark.parametrize(
    "name, devices, mesh, better",
    [
        ("mha_tiny", 6, {}, "data=3 --config.mesh.fsdp=2 --config.mesh.tensor=1"),
        ("mha_2p5b", 8, dict(tensor=4), "data=1 --config.mesh.fsdp=4 --config.mesh.tensor=2"),
        ("lrkv_6p3b", 8, dict(tensor=2), "data=1 --config.mesh.fsdp=8 --config.mesh.tensor=1"),
    ],
)
def test_a_mesh_that_does_not_divide_names_one_that_does(name, devices, mesh, better):
    run = experiment_lib.resolve(load_config(CONFIGS / f"{name}.py"))
    there = sharding.make_mesh(sharding.MeshConfig(**mesh), jax.devices()[:devices])
    with pytest.raises(
        UserError, match=f"not divide .* {devices} devices this mesh divides: .*{better}$"
    ):
        preflight.check_mesh(run, there)


@pytest.mark.parametrize(
    "mesh, length, message",
    [
        (dict(tensor=2), 32, r"config.mesh.tensor = 2 does not divide the 257 of head \[32, 257\]"),
        (dict(fsdp=1, sequence=8), 24, "sequence = 8 .* 16 chunks, .* 24 tokens .* is 16 or 32"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model(source, tmp_path, mesh, length, message):
    """Before the data are prepared or a file is written."""
    config = runs.small_config(*source)
    config.mesh.update(mesh)
    config.data.update(sequence_length=length, directory=str(tmp_path / "data"))
    with pytest.raises(UserError, match=message):
        loop.train(config, epath.Path(tmp_path / "run"))
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()


def test_the_lock_is_released_with_its_process(tmp_path):
    workdir = epath.Path(tmp_path)
    with (
        identity.exclusive(workdir),
        pytest.raises(UserError, match="in use by another run"),
        identity.exclusive(workdir),
    ):
        pass
    with identity.exclusive(workdir):
        assert (tmp_path / ".lock").exists()


def test_a_workdir_that_cannot_be_made():
    with (
        pytest.raises(UserError, match="^--workdir = '/proc/run': cannot be made: "),
        identity.exclusive(epath.Path("/proc/run")),
    ):
        pass


def test_identity_ignores_when_to_look_and_nothing_else(source):
    of = lambda config, dtype="float32": identity.identity(config, jnp.dtype(dtype))
    base = of(runs.small_config(*source))
    when = dict(log_every=3, eval_every=7, checkpoint_every=5, keep_checkpoints=1, stop_after=5)
    rest = dict(max_bad_steps=2, sample_prompt="a", sample_tokens=2)
    assert of(runs.small_config(*source, **when, **rest)) == base
    assert of(runs.small_config(*source, seed=1)) != base
    assert of(runs.small_config(*source, eval_rows=1)) != base
    json.dumps(base)
    config = runs.small_config(*source)
    config.mesh.fsdp = 4
    config.compute.update(attention="xla", remat="full")
    config.train.grad_accumulation = 2  # as fewer chips need
    assert of(config) == base
    assert of(config, "bfloat16") != base  # what "auto" is elsewhere
    config.compute.dtype = "float32"  # what it is here
    assert of(config) == base


# -- what a workdir belongs to ---------------------------------------------------------------------


@pytest.fixture
def begun(source, tmp_path, monkeypatch):
    """A workdir with a checkpoint of step 10, and a function that continues it."""
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])

    def go_on(**overrides):
        config = runs.small_config(*source, stop_after=10)
        for section, values in overrides.items():
            config[section].update(values)
        loop.train(config, workdir)

    workdir = epath.Path(tmp_path / "run")
    go_on()
    return workdir, go_on


def claims(workdir) -> dict[str, str]:
    names = ("config.json", "config.txt", "dataset.json", "tokenizer.json")
    return {name: (workdir / name).read_text() for name in names}


def test_a_run_does_not_change_its_dtype_with_its_platform(begun, monkeypatch):
    workdir, go_on = begun
    before = claims(workdir)
    on_gpu = lambda self, platform, layers, real=experiment_lib.ComputeConfig.resolve: real(
        self, "gpu", layers
    )
    monkeypatch.setattr(experiment_lib.ComputeConfig, "resolve", on_gpu)
    with pytest.raises(UserError) as error:
        go_on()
    assert "compute.dtype: there 'float32', now 'bfloat16'" in str(error.value)
    assert "--config.compute.dtype=float32" in str(error.value)
    assert claims(workdir) == before
    go_on(compute=dict(dtype="float32"))


def test_a_workdir_that_does_not_say_its_dtype_goes_on_and_says_it(begun, capsys):
    workdir, go_on = begun
    text = (workdir / "config.json").read_text()
    assert '"dtype": "float32"' in text
    (workdir / "config.json").write_text(text.replace('"float32"', '"auto"'))
    go_on()
    told = f"WARNING: {workdir} does not say in which dtype it was trained: it goes on in float32"
    assert told in capsys.readouterr().err
    assert (workdir / "config.json").read_text() == text


@pytest.fixture
def prepared(source, tmp_path):
    """A function of a name: a folder of prepared rows of a text of that name; 272 tokens."""

    def prepare_(name):
        text = tmp_path / f"{name}.txt"
        lines = pathlib.Path(source[0]).read_text().splitlines()
        random.Random(name).shuffle(lines)
        text.write_text("\n".join(lines).replace("t", name[0]) + "\n")
        config = runs.small_config(str(text), str(tmp_path / "data"))
        config.data.update(tokenizer="bpe", vocab_size=272)
        return pathlib.Path(prepare.prepare(experiment_lib.resolve(config).data))

    return prepare_


@pytest.mark.slow
def test_prepared_rows_may_move_and_not_change(source, tmp_path, prepared, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
    workdir, one, two = epath.Path(tmp_path / "run"), tmp_path / "one", tmp_path / "two"

    def go_on(folder, stop_after=10):
        config = runs.small_config(f"prepared:{folder}", "", stop_after=stop_after)
        config.data.update(vocab_size=272, tokenizer="bpe")
        loop.train(config, workdir)

    shutil.copytree(prepared("xylophone"), one)
    workdir.mkdir()
    (workdir / "tokenizer.json").write_text("{}")  # of a start without a checkpoint
    go_on(one)
    one.rename(two)
    go_on(two, stop_after=20)
    assert (workdir / "checkpoints" / "20").exists() and str(two) in claims(workdir)["config.json"]

    before = claims(workdir)
    digest = json.loads(before["dataset.json"])["dataset"]
    other = loader.open_dataset(prepared("zebra"))
    assert other.digest != digest == loader.open_dataset(two).digest
    shutil.copytree(other.path, one)
    for folder in (one, two):  # another name, and the same one
        if folder == two:
            two.rename(tmp_path / "three")
            shutil.copytree(other.path, two)
        with pytest.raises(UserError, match="rows or the tokenizer in .* are not those it was tr"):
            go_on(folder, stop_after=30)
        assert claims(workdir) == before and not (workdir / "checkpoints" / "30").exists()

    # As it was written once: the folder's name. The tokenizer still tells.
    (workdir / "dataset.json").write_text('{"dataset": "two"}')
    with pytest.raises(UserError, match="tokenizer.json is not the tokenizer of .*two, and was le"):
        go_on(two)
    assert claims(workdir)["tokenizer.json"] == before["tokenizer.json"]
    shutil.rmtree(two)
    (tmp_path / "three").rename(two)
    go_on(two, stop_after=20)
    assert claims(workdir) == before


def test_prepared_rows_with_another_vocabulary(prepared):
    config = runs.small_config(f"prepared:{prepared('xylophone')}", "")
    config.data.update(vocab_size=300, tokenizer="bpe")
    data = experiment_lib.resolve(config).data
    with pytest.raises(UserError, match="^config.data.vocab_size = 300: the tokenizer .* has 272"):
        preflight.data_set(data)


def test_rows_are_told_from_others_behind_the_same_manifest(tmp_path, prepared):
    one, two = prepared("xylophone"), prepared("xenon")  # the same words in another order
    before = loader.open_dataset(one).digest
    copy = shutil.copytree(one, tmp_path / "copy")
    assert loader.open_dataset(copy).digest == before
    shutil.rmtree(copy / manifest.ROWS)
    shutil.copytree(two / manifest.ROWS, copy / manifest.ROWS)
    changed = loader.open_dataset(copy)
    assert changed.tokenizer.vocabulary() == loader.open_dataset(one).tokenizer.vocabulary()
    assert changed.digest != before


def test_the_code_of_hosts_is_compared_in_every_folder(monkeypatch):
    seen, gathered = [], {}
    monkeypatch.setattr(preflight.distributed, "check_same", gathered.update)
    monkeypatch.setattr(preflight.hashlib, "sha256", lambda: _Recording(seen))
    preflight.check_processes(load_config(CONFIGS / "lrkv_tiny.py"))
    names = {part.partition(b"\0")[0].decode() for part in seen}
    package = pathlib.Path(kvjax.__file__).parent
    assert names == {str(path.relative_to(package)) for path in package.rglob("*.py")}
    assert "main.py" in names and gathered["kvjax's code"] == "0" * 12


class _Recording:
    """A hash that keeps what it is given."""

    def __init__(self, seen):
        self.update = seen.append

    def hexdigest(self):
        return "0" * 64
