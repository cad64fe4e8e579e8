"""What is checked before a run begins: memory, mesh, data; of processes: test_multihost.py."""

import pathlib
import types

from etils import epath
import jax
import numpy as np
import pytest

import kvjax
from kvjax import experiment as experiment_lib
from kvjax.data import tokenizer
from kvjax.distributed import sharding
from kvjax.foundation import runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.training import loop
from kvjax.training import memory_estimate
from kvjax.training import preflight
from tests import runs


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
        lanes=memory_estimate.lanes_of(platform),
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


def test_a_tokenizer_json_with_another_vocabulary(source, tmp_path):
    """Before the data are prepared or a file is written."""
    file = tmp_path / "tokenizer.json"
    tokenizer.byte_tokenizer().save(file)
    config = runs.small_config(*source)
    config.data.update(tokenizer=str(file), vocab_size=300, directory=str(tmp_path / "data"))
    with pytest.raises(UserError, match=r"= 300: the tokenizer '.*/tokenizer\.json' has 257; set"):
        loop.train(config, epath.Path(tmp_path / "run"))
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()


def test_prepared_rows_with_another_vocabulary(source, tmp_path):
    folder = runs.prepare_text(source[0], tmp_path, "xylophone")
    config = runs.small_config(f"prepared:{folder}", "")
    config.data.update(vocab_size=300, tokenizer="bpe")
    data = experiment_lib.resolve(config).data
    with pytest.raises(UserError, match="^config.data.vocab_size = 300: the tokenizer .* has 272"):
        preflight.data_set(data)


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
