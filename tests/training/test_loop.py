"""Runs in this process learn, resume to the bit, and refuse other data."""

import shutil

from etils import epath
from flax import nnx
import jax
import numpy as np
import pytest

from kvjax import config as config_lib
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.training import loop
from kvjax.workdir import metrics
from tests import runs
from tests.runs import records

pytestmark = pytest.mark.usefixtures("one_device")


def test_files_of_a_run(whole):
    losses = [r["loss"] for r in records(whole.workdir) if "loss" in r]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    last = records(whole.workdir)[-1]
    assert whole.last["validation_bpb"] == last["validation_bpb"] < 5
    files = ("config.txt", "config.json", "tokenizer.json", "curves.png", "sample.txt")
    for name in (*files, "events", "checkpoints"):
        assert (whole.workdir / name).exists(), name
    assert all(text in whole.output for text in ("bits per byte", "xz -9e", "--- sample ---"))


def _then_replace_records(evaluate):
    """Replaces the file by a copy, as an editor does on saving."""

    def evaluate_and_replace(run, *args):
        evaluate(run, *args)
        file = run.workdir / metrics.METRICS
        shutil.copy(file, file.parent / "copy")
        (file.parent / "copy").replace(file)

    return evaluate_and_replace


def test_stopping_and_resuming_changes_nothing(whole, tmp_path, monkeypatch):
    config = whole.config.copy_and_resolve_references()
    config.train.sample_tokens = 0
    with monkeypatch.context() as patch, pytest.raises(UserError, match="jsonl was moved") as error:
        patch.setattr(
            loop.TrainingLoop, "_evaluate", _then_replace_records(loop.TrainingLoop._evaluate)
        )
        loop.train(config, epath.Path(tmp_path))
    assert "The last checkpoint is intact (steps [10, 20])" in str(error.value)
    for stop_after in (27, 0):
        config.train.stop_after = stop_after
        loop.train(config, epath.Path(tmp_path))
    expected = (whole.workdir / metrics.METRICS).read_bytes()
    assert (tmp_path / metrics.METRICS).read_bytes() == expected
    # Already complete: nothing is compiled, which takes minutes at scale.
    monkeypatch.setattr(loop.TrainingLoop, "_train_step", lambda run: pytest.fail("compiled"))
    assert loop.train(config, epath.Path(tmp_path))["step"] == 40
    assert (tmp_path / metrics.METRICS).read_bytes() == expected


def test_bits_per_byte_follow_their_definition(whole):
    """Sum of nats over targets with bytes / (ln 2 x bytes), from logits of a restored model."""
    import jax.numpy as jnp

    from kvjax.data import loader, prepare

    experiment = config_lib.resolve(whole.config)
    dataset = loader.open_dataset(prepare.prepare(experiment.data))
    from orbax.checkpoint import v1 as ocp

    checkpointer = ocp.training.Checkpointer(whole.workdir / "checkpoints")
    state = checkpointer.load_checkpointables()["state"]
    graph = parameters.graph(experiment.model)
    leaves = jax.tree.leaves(state["params"])
    structure = jax.tree.structure(parameters.abstract(experiment.model).shapes)
    model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
    logits_of = jax.jit(lambda tokens: model.logits(model(tokens)))
    nats = num_bytes = 0.0
    for i in range(dataset.num_rows("validation")):
        row = np.asarray(dataset.rows("validation")[i]["tokens"], np.int32)
        logits = np.asarray(logits_of(jnp.asarray(row[None, :-1]))[0], np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = row[1:]
        counted = dataset.token_bytes[targets] > 0
        nats -= log_p[np.arange(len(targets)), targets][counted].sum()
        num_bytes += dataset.token_bytes[targets].sum()
    assert num_bytes == dataset.info["splits"]["validation"]["bytes"]
    assert whole.last["validation_bpb"] == pytest.approx(nats / np.log(2) / num_bytes, rel=1e-6)


def test_prepared_rows_that_are_too_short(source, tmp_path):
    from kvjax.data import prepare

    folder = prepare.prepare(config_lib.resolve(runs.small_config(*source)).data)
    config = runs.small_config(*source, stop_after=1)
    config.data.update(source=f"prepared:{folder}", sequence_length=64)
    with pytest.raises(UserError, match=r"sequence_length=64 must be .* at most the 32"):
        loop.train(config, epath.Path(tmp_path))


def test_another_corpus_in_the_same_workdir_is_refused(whole, tmp_path):
    config = whole.config.copy_and_resolve_references()
    config.train.update(stop_after=1, sample_tokens=0)
    config.data.source = runs.write_text(tmp_path / "text.txt")
    config.data.directory = str(tmp_path / "data")
    loop.train(config, epath.Path(tmp_path / "run"))
    (tmp_path / "text.txt").write_text("Another text.\n" * 5000)
    with pytest.raises(UserError, match="dataset: there"):
        loop.train(config, epath.Path(tmp_path / "run"))


def test_data_errors_come_before_training(source, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    config = runs.small_config(str(tmp_path / "empty.txt"), source[1])
    with pytest.raises(UserError, match=r"empty\.txt"):
        loop.train(config, epath.Path(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(source, tmp_path, monkeypatch):
    """Ten steps on four devices, ten on two, and on a mesh that splits rows: as twenty on four."""
    monkeypatch.undo()
    real = jax.devices()

    def run(folder, devices, mesh, **keys):
        monkeypatch.setattr(jax, "devices", lambda *args: real[:devices])
        config = runs.small_config(*source, num_steps=20, eval_every=10, **keys)
        config.mesh.update(mesh)
        loop.train(config, epath.Path(folder))
        return [r["loss"] for r in records(folder) if "loss" in r]

    whole = run(tmp_path / "whole", 4, dict(fsdp=4))
    half = run(tmp_path / "half", 4, dict(fsdp=4), stop_after=10)
    assert half == whole[:10] and len(whole) == 20
    for devices, mesh in ((2, dict(fsdp=2)), (4, dict(fsdp=2, sequence=2))):
        folder = tmp_path / str(devices)
        shutil.copytree(tmp_path / "half", folder)
        losses = run(folder, devices, mesh)
        assert losses[:10] == half
        np.testing.assert_allclose(losses, whole, rtol=1e-5)
