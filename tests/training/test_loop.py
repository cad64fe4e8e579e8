"""The loop, in this process: it learns, resumes, accumulates, and stops with one message."""

import contextlib
import io
import shutil
import types

from etils import epath
from flax import nnx
import jax
import numpy as np
import pytest

from kvjax import experiment as experiment_lib
from kvjax.costs import formulas
from kvjax.data import tokenizer
from kvjax.distributed import sharding
from kvjax.experiment import TrainConfig
from kvjax.foundation.errors import UserError
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer
from kvjax.training import loop
from kvjax.training import program
from kvjax.workdir import metrics
from tests import quick
from tests import runs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return runs.write_text(folder / "text.txt"), str(folder / "data")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The workdir of a run as the recipe has it, from its first step to its sample; its figures."""
    workdir = tmp_path_factory.mktemp("whole")
    config = runs.small_config(*source, sample_tokens=4, log_every=2)
    config.compute.update(unroll="auto", query_chunk=-1, loss_chunks=8)
    config.optimizer.newton_schulz_steps = 5
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
        last = loop.train(config, epath.Path(workdir))
    return types.SimpleNamespace(
        config=config, workdir=workdir, last=last, output=output.getvalue()
    )


def records(workdir) -> list[dict]:
    return metrics.read_records(epath.Path(workdir) / metrics.METRICS)


def test_a_run_leaves_what_it_promises(whole):
    losses = [r["loss"] for r in records(whole.workdir) if "loss" in r]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    last = records(whole.workdir)[-1]
    assert whole.last["validation_bpb"] == last["validation_bpb"] < 5
    files = ("config.txt", "config.json", "tokenizer.json", "curves.png", "sample.txt")
    for name in (*files, "events", "checkpoints"):
        assert (whole.workdir / name).exists(), name
    assert all(text in whole.output for text in ("bits per byte", "xz -9e", "--- sample ---"))


def test_stopping_and_going_on_changes_nothing(source, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = lambda **keys: runs.small_config(*source, num_steps=12, eval_every=6, **keys)
    loop.train(config(), epath.Path(whole))
    for stop_after in (7, 0):
        loop.train(config(stop_after=stop_after), epath.Path(parts))
    assert (parts / metrics.METRICS).read_bytes() == (whole / metrics.METRICS).read_bytes()
    # Already complete: nothing is compiled, which takes minutes at scale.
    monkeypatch.setattr(loop.Run, "_train_step", lambda run: pytest.fail("compiled"))
    assert loop.train(config(), epath.Path(parts))["step"] == 12
    assert (parts / metrics.METRICS).read_bytes() == (whole / metrics.METRICS).read_bytes()


def test_what_a_bucket_refuses_after_the_last_checkpoint_is_a_warning(capsys):
    run = object.__new__(loop.Run)

    def refuse():
        raise RuntimeError("503: slow down\nmore")

    run.workdir = epath.Path("/a/folder")
    with pytest.raises(RuntimeError):
        run._write_last("curves.png", refuse)
    run.workdir = epath.Path("gs://bucket/run")
    run._write_last("curves.png", refuse)
    said = "WARNING: gs://bucket/run/curves.png was not written: 503: slow down\n"
    assert capsys.readouterr().err == said


def test_documents_of_a_sample_are_told_apart_without_special_tokens(whole, tmp_path, monkeypatch):
    two = types.SimpleNamespace(texts=["is dead.<|bos|>Enter"])
    monkeypatch.setattr(loop, "generate", lambda *_, **__: two)
    shutil.copytree(whole.workdir, tmp_path, dirs_exist_ok=True)
    loop.train(whole.config, epath.Path(tmp_path))
    assert (tmp_path / "sample.txt").read_text() == "The king is dead.\n\nEnter\n"


@pytest.mark.slow
def test_a_sample_of_several_hosts_has_the_gains_of_training(source, tmp_path, monkeypatch):
    """They read its weights anew: those of norms outside the blocks are used in float32."""
    asked, sample = [], loop.Run._sample

    def as_one_of_two(run, params):
        with monkeypatch.context() as patched:
            patched.setattr(loop.distributed, "count", lambda: 2)
            patched.setattr(loop, "read_parameters", lambda *args: asked.append(args[2]) or params)
            return sample(run, params)

    monkeypatch.setattr(loop.Run, "_sample", as_one_of_two)
    config = runs.small_config(*source, num_steps=1, sample_tokens=4)
    config.model.norm_gain, config.compute.dtype = True, "bfloat16"
    loop.train(config, epath.Path(tmp_path))
    (params,) = asked
    assert params["final_norm"]["gain"].dtype == "float32"
    assert params["embedding"].dtype == "bfloat16"


def test_the_sample_is_the_same_each_time(whole, tmp_path):
    shutil.copytree(whole.workdir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "sample.txt").unlink()
    loop.train(whole.config, epath.Path(tmp_path))
    texts = [(folder / "sample.txt").read_text() for folder in (whole.workdir, tmp_path)]
    assert texts[0] == texts[1] and texts[0].startswith("The king ")


@pytest.mark.parametrize("prompt", ["The king ", "The king " * 9])
def test_a_sample_ends_where_positions_do(source, prompt):
    config = runs.small_config(*source, sample_tokens=60, sample_prompt=prompt)
    config.model.update(positions="learned", max_positions=32)
    experiment = experiment_lib.resolve(config)
    graph, params = nnx.split(Transformer(experiment.model, jax.random.key(0)))
    run = types.SimpleNamespace(
        experiment=experiment,
        compute=Compute(),
        program=types.SimpleNamespace(graph=graph),
        dataset=types.SimpleNamespace(tokenizer=tokenizer.byte_tokenizer()),
    )
    sample = loop.Run._sample(run, nnx.to_pure_dict(params))
    assert sample.startswith(prompt)
    # BOS and the prompt's bytes have positions, and so have all tokens but the last.
    assert len(sample) > len(prompt) if len(prompt) < 32 else sample == prompt


def test_bits_per_byte_is_what_its_definition_says(whole):
    """Sum of nats over targets with bytes / (ln 2 x bytes), from logits of a restored model."""
    import jax.numpy as jnp

    from kvjax.data import loader
    from kvjax.data import prepare

    experiment = experiment_lib.resolve(whole.config)
    dataset = loader.open_dataset(prepare.prepare(experiment.data))
    from orbax.checkpoint import v1 as ocp

    checkpointer = ocp.training.Checkpointer(whole.workdir / "checkpoints")
    state = checkpointer.load_checkpointables()["state"]
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Transformer(experiment.model, jax.random.key(0)))
    )
    leaves = jax.tree.leaves(state["params"])
    structure = jax.tree.structure(nnx.to_pure_dict(abstract))
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


def test_gradient_accumulation_is_the_same_step(source, tmp_path):
    one = loop.train(runs.small_config(*source, num_steps=5), epath.Path(tmp_path / "one"))
    config = runs.small_config(*source, num_steps=5, grad_accumulation=4)
    four = loop.train(config, epath.Path(tmp_path / "four"))
    assert four["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
    first = [records(tmp_path / name)[0] for name in ("one", "four")]
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-5)


def test_a_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(source, tmp_path, monkeypatch):
    real = program.train_step

    def poisoned(state, rows, **kwargs):
        new, values = real(state, rows, **kwargs)
        bad = state["step"] == 7
        return new, values | {"loss": jax.numpy.where(bad, jax.numpy.nan, values["loss"])}

    monkeypatch.setattr(program, "train_step", poisoned)
    config = lambda: runs.small_config(*source, num_steps=9, checkpoint_every=3)
    with pytest.raises(UserError, match=r"step 8: loss = nan: stopped.*steps \[3, 6\]"):
        loop.train(config(), epath.Path(tmp_path))
    assert records(tmp_path)[-1]["step"] <= 7
    monkeypatch.undo()
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
    assert loop.train(config(), epath.Path(tmp_path))["step"] == 9


def corrupted(monkeypatch, steps, loss=np.nan):
    """From here on the loss of these steps (from 0) is another, and their gradients are huge."""
    real = program.mean_loss
    current = []
    monkeypatch.setattr(program, "mean_loss", lambda *a, **k: real(*a, **k) * factor())

    def factor():
        bad = jax.numpy.isin(current[-1], jax.numpy.asarray(steps))
        return jax.numpy.where(bad, loss, 1.0)

    step = program.train_step

    def knowing(state, rows, **kwargs):
        current.append(state["step"])
        return step(state, rows, **kwargs)

    monkeypatch.setattr(program, "train_step", knowing)


def state_of(workdir, step):
    from orbax.checkpoint import v1 as ocp

    return ocp.load(workdir / "checkpoints" / str(step), checkpointable_name="state")


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("loss", quick.only([50.0], [np.nan, 50.0]))
def test_bad_steps_are_skipped_and_counted(source, tmp_path, monkeypatch, loss):
    """Parameters and optimizer stay as they are; the step and the data go on; resume is exact."""
    policy = dict(bad_steps="skip", spike_factor=3.0, num_steps=12, checkpoint_every=1)
    config = lambda **keys: runs.small_config(*source, **policy, keep_checkpoints=99, **keys)
    corrupted(monkeypatch, [5, 6, 9], loss)
    loop.train(config(), epath.Path(tmp_path / "whole"))
    for stop_after in (6, 0):  # between two bad steps
        loop.train(config(stop_after=stop_after), epath.Path(tmp_path / "parts"))
    files = [(tmp_path / name / metrics.METRICS).read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    rows = {r["step"]: r for r in records(tmp_path / "whole") if "skipped_steps" in r}
    assert [rows[s]["skipped_steps"] for s in range(1, 13)] == [0] * 5 + [1, 2, 2, 2, 3, 3, 3]
    assert [rows[s]["bad_steps_in_a_row"] for s in (5, 6, 7, 8, 10)] == [0, 1, 2, 0, 1]
    assert ("loss" in rows[6]) == np.isfinite(loss) and rows[6]["bad"] == 1
    assert rows[12]["learning_rate"] == rows[1]["learning_rate"]  # its cooldown is 3 steps later
    states = {s: state_of(tmp_path / "whole", s) for s in (4, 5, 6, 7, 8)}
    for kept in ("params", "optimizer"):
        for good, skipped in ((5, 6), (5, 7)):
            for x, y in zip(*(leaves(states[s][kept]) for s in (good, skipped)), strict=True):
                np.testing.assert_array_equal(x, y)
        for good in (4, 8):
            moved = zip(*(leaves(states[s][kept]) for s in (5, good)), strict=True)
            assert all(np.any(x != y) for x, y in moved if x.size > 1)
    assert states[7]["step"] == 7 and states[7]["bad"]["skipped"] == 2
    assert states[7]["bad"]["mean_loss"] == states[5]["bad"]["mean_loss"] > 0


@pytest.mark.parametrize("loss, grad_norm", [(1.0, np.inf), (1.0, np.nan), (np.inf, 1.0)])
def test_one_figure_that_is_not_finite_makes_a_step_bad(loss, grad_norm):
    """A gradient may overflow where its loss does not."""
    policy = TrainConfig(num_steps=1, batch_size=1, bad_steps="skip")
    bad = dict(skipped=4, in_a_row=2, mean_loss=np.float32(1.5))
    is_bad, new, _ = program.judge(
        jax.tree.map(jax.numpy.asarray, bad),
        jax.numpy.float32(loss),
        jax.numpy.float32(grad_norm),
        policy,
    )
    assert is_bad and new == dict(skipped=5, in_a_row=3, mean_loss=1.5)


def test_the_mean_of_recent_losses(source, tmp_path):
    config = runs.small_config(*source, num_steps=5, spike_factor=100.0)
    loop.train(config, epath.Path(tmp_path))
    rows = [r for r in records(tmp_path) if "loss" in r]
    mean = rows[0]["loss"]
    assert mean == pytest.approx(np.log(257), rel=1e-6)  # the head starts at zero
    assert rows[0]["mean_loss"] == 0
    for row in rows[1:]:
        assert row["mean_loss"] == pytest.approx(mean, rel=1e-6)
        mean += program.MEAN_WEIGHT * (row["loss"] - mean)
    assert all(r["bad"] == 0 and "skipped_steps" not in r for r in rows)


def test_too_many_bad_steps_in_a_row(source, tmp_path, monkeypatch):
    corrupted(monkeypatch, [2, 4, 5, 12, 13, 14])
    config = runs.small_config(*source, bad_steps="skip", max_bad_steps=3)
    said = r"step 15: .*loss = nan.*max_bad_steps = 3 bad steps in a row: stopped.*steps \[10\]"
    with pytest.raises(UserError, match=said):
        loop.train(config, epath.Path(tmp_path))


@pytest.mark.slow
def test_a_spike_stops_if_it_is_not_skipped(source, tmp_path, monkeypatch):
    corrupted(monkeypatch, [12], 4.0)
    loop.train(runs.small_config(*source, num_steps=14), epath.Path(tmp_path / "ignored"))
    config = runs.small_config(*source, spike_factor=1.5)
    said = r"step 13: loss = .*over config\.train\.spike_factor = 1\.5 times .*: stopped"
    with pytest.raises(UserError, match=said):
        loop.train(config, epath.Path(tmp_path / "run"))


@pytest.mark.slow
def test_the_policy_changes_no_number_of_a_good_run(source, tmp_path, monkeypatch):
    """By default to the bit; "skip" is another program, as close as rounding leaves it."""
    run = lambda name, **policy: loop.train(
        runs.small_config(*source, num_steps=9, **policy), epath.Path(tmp_path / name)
    )
    run("default")
    run("skip", bad_steps="skip", spike_factor=9.0)
    real = program.train_step

    def without(state, rows, policy, **kwargs):
        new, values = real(state, rows, **kwargs)
        return new | dict(bad=state["bad"]), values

    monkeypatch.setattr(program, "train_step", without)
    run("none")
    default, skip, none = (state_of(tmp_path / name, 9) for name in ("default", "skip", "none"))
    for key in ("params", "optimizer", "step"):
        for x, y, z in zip(*(leaves(s[key]) for s in (default, none, skip)), strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_allclose(x, z, rtol=1e-3, atol=1e-4)


def test_exaflops_and_timing(whole):
    experiment = experiment_lib.resolve(whole.config)
    per_token = formulas.training_flops_per_token(experiment.model, 32)
    rows = [r for r in records(whole.workdir) if "loss" in r]
    assert [r["exaflops"] for r in rows] == [r["tokens"] * per_token / 1e18 for r in rows]
    timing = metrics.read_records(epath.Path(whole.workdir) / metrics.TIMING)
    assert [r["step"] for r in timing] == [1, *range(2, 41, 2)]
    assert timing[-1]["tokens_per_second_per_device"] == timing[-1]["tokens_per_second"] > 0
    assert "mfu" not in timing[-1] and "hbm_peak_bytes" not in timing[-1]  # a CPU tells neither


@pytest.mark.parametrize("bad_steps", quick.only(["stop"], ["stop", "skip"]))
def test_weights_that_are_no_numbers_are_never_saved(source, tmp_path, monkeypatch, bad_steps):
    """The update of a step that is to be saved goes wrong while its loss and gradient are fine."""
    real = program.optax.apply_updates
    poisoned = lambda *args: jax.tree.map(lambda x: x * jax.numpy.nan, real(*args))
    config = lambda **keys: runs.small_config(*source, bad_steps=bad_steps, **keys)
    loop.train(config(stop_after=10), epath.Path(tmp_path))
    monkeypatch.setattr(program.optax, "apply_updates", poisoned)
    with pytest.raises(UserError, match=r"param_norm = nan: stopped. Checkpoints of steps \[10\]"):
        loop.train(config(checkpoint_every=11), epath.Path(tmp_path))


def test_a_relative_workdir(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop.train(runs.small_config(*source, stop_after=10), epath.Path("runs/one"))
    assert (tmp_path / "runs/one/checkpoints/10").exists()


def test_prepared_rows_that_are_too_short(source, tmp_path):
    from kvjax.data import prepare

    folder = prepare.prepare(experiment_lib.resolve(runs.small_config(*source)).data)
    config = runs.small_config(*source, stop_after=1)
    config.data.update(source=f"prepared:{folder}", sequence_length=64)
    with pytest.raises(UserError, match=r"sequence_length=64 must be .* at most the 32"):
        loop.train(config, epath.Path(tmp_path))


def test_a_workdir_of_another_config_is_refused(source, tmp_path):
    loop.train(runs.small_config(*source, stop_after=10), epath.Path(tmp_path))
    before = (tmp_path / metrics.METRICS).read_bytes()
    other = runs.small_config(*source)
    other.attention.rank = 8
    with pytest.raises(UserError, match=r"attention\.rank: there 4, now 8"):
        loop.train(other, epath.Path(tmp_path))
    assert (tmp_path / metrics.METRICS).read_bytes() == before
    free = runs.small_config(*source, log_every=5, keep_checkpoints=1)
    assert loop.train(free, epath.Path(tmp_path))["step"] == 40


def test_another_corpus_in_the_same_workdir_is_refused(source, tmp_path):
    import pathlib

    text = tmp_path / "text.txt"
    text.write_text(pathlib.Path(source[0]).read_text())
    config = lambda: runs.small_config(str(text), source[1], stop_after=10)
    loop.train(config(), epath.Path(tmp_path / "run"))
    text.write_text("Another text.\n" * 5000)
    with pytest.raises(UserError, match="dataset: there"):
        loop.train(config(), epath.Path(tmp_path / "run"))


def test_data_errors_come_before_training(source, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    config = runs.small_config(str(tmp_path / "empty.txt"), source[1])
    with pytest.raises(UserError, match=r"empty\.txt"):
        loop.train(config, epath.Path(tmp_path / "run"))
    config = runs.small_config(*source)
    config.data.vocab_size = 300
    with pytest.raises(UserError, match="vocab_size = 300: the tokenizer 'byte' has 257"):
        loop.train(config, epath.Path(tmp_path / "run"))


@pytest.mark.slow
def test_eight_devices_train_like_one(source, tmp_path, monkeypatch):
    monkeypatch.undo()
    if len(jax.devices()) < 8:
        pytest.fail("the test session must force 8 CPU devices")
    eight = loop.train(runs.small_config(*source, num_steps=20), epath.Path(tmp_path / "eight"))
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
    one = loop.train(runs.small_config(*source, num_steps=20), epath.Path(tmp_path / "one"))
    assert eight["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
    assert sharding.make_mesh(sharding.MeshConfig(), jax.devices()).size == 1


@pytest.mark.slow
def test_a_run_goes_on_over_another_mesh(source, tmp_path, monkeypatch):
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
