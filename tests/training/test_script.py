"""The training loop with a program that only sums tokens: its calls, records and messages.

Batch, microbatches, rows, vocabulary and periods all differ in size.
"""

import contextlib
import dataclasses
import math
import os
import re
import signal
import types

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import config as config_lib, distributed
from kvjax.config import TrainConfig
from kvjax.costs import formulas
from kvjax.data import loader, prepare
from kvjax.distributed import sharding
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.training import loop, preflight
from kvjax.workdir import checkpoint, metrics, storage
from tests import runs
from tests.runs import records
from tests.training.script import BAD, BYTES, VOCABULARY, WIDTH, Script

STEPS, BATCH, PARTS, LENGTH, EVAL_ROWS = 13, 8, 2, 32, 6
SECONDS, SPEED = 12.34, 1234.5


@pytest.fixture
def script(source, tmp_path, monkeypatch):
    """A script with `run`, its data set, and fakes of clock and drawing."""
    config = runs.small_config(*source, num_steps=STEPS, batch_size=BATCH, seed=5)
    config.train.update(grad_accumulation=PARTS, eval_rows=EVAL_ROWS, max_bad_steps=4)
    config.train.update(log_every=3, eval_every=5, checkpoint_every=4, snapshot_every=7)
    config.train.update(keep_checkpoints=3, bad_steps="skip")
    config.optimizer.update(warmup_steps=3, cooldown_fraction=0.5, final_fraction=0.1)
    config.optimizer.update(matrix_learning_rate=0.03, lr_scale=0.5)
    resolved = config_lib.resolve(config)
    dataset = loader.open_dataset(prepare.prepare(resolved.data))
    model = dataclasses.replace(resolved.model, vocab_size=VOCABULARY)
    mesh = sharding.make_mesh(resolved.mesh, jax.devices()[:2])
    script = Script(mesh)
    script.experiment, script.dataset = dataclasses.replace(resolved, model=model), dataset
    compute = resolved.compute.resolve("cpu", 2)

    def run(workdir="run", parent=None, teacher=None, options=None, **keys):
        train = dataclasses.replace(script.experiment.train, **keys)
        experiment = dataclasses.replace(script.experiment, train=train)
        folder = epath.Path(tmp_path / workdir)
        folder.mkdir(exist_ok=True)
        arguments = experiment, compute, mesh, folder, dataset, parent, teacher
        return loop.TrainingLoop(preflight.PreparedRun(*arguments), **options or {}).run()

    script.run = run

    class Clock(metrics.Clock):
        tokens_per_second = SPEED

        def __init__(self, **arguments):
            script.clock = arguments
            super().__init__(**arguments)

        def tick(self):
            super().tick()
            script.calls.append("tick")

        @contextlib.contextmanager
        def paused(self):
            script.calls.append("[")
            yield
            script.calls.append("]")

        def lap(self):
            return dict(steps=self.steps) if self.steps > 3 else {}

    save = checkpoint.Checkpoints.save

    def save_noted(checkpoints, step, state, position):
        name = checkpoints.directory.name
        script.calls.append(f"{name} {step} {sorted(state)} {position}")
        script.at.get((name, step), lambda: None)()
        save(checkpoints, step, state, position)

    close = metrics.MetricsWriter.close

    def close_noted(writer):
        script.calls.append("close")
        return close(writer)

    monkeypatch.setattr(metrics.MetricsWriter, "close", close_noted)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", save_noted)
    monkeypatch.setattr(metrics, "Clock", Clock)
    monkeypatch.setattr(metrics, "draw_curves", lambda *a, **k: setattr(script, "drawn", (a, k)))
    monkeypatch.setattr(loop, "Program", script)
    monkeypatch.setattr(runtime, "seconds_since_launch", lambda: SECONDS)
    return script


def refuse():
    raise OSError(28, "No space left on device")


def expected_records(script, start=0, masked=False):
    """Returns the expected records, computed from the data set's rows."""
    e, dataset = script.experiment, script.dataset
    options = dict(sequence_length=LENGTH, batch_size=BATCH, seed=5, position=0)
    batches = loader.train_batches(dataset, **options)
    tokens_seen = [r["tokens"] for r in dataset.rows("validation").__getitems__(range(EVAL_ROWS))]
    tokens_seen = np.concatenate(
        [np.ravel(tokens_seen), np.full(2 * (LENGTH + 1), dataset.tokenizer.bos_id)]
    )
    num_bytes = np.append(dataset.token_bytes, 0)[tokens_seen].sum()
    per_token = formulas.training_flops_per_token(e.model, LENGTH)
    expected, total = [], np.float32(start)
    for step in range(1, STEPS + 1):
        rows = next(batches)
        np.testing.assert_array_equal(script.rows[step], rows)
        total += np.float32(rows.sum() / 1e4)
        tokens = step * BATCH * LENGTH
        if step % 3 == 0 or step == STEPS:
            updates = max(step - 1 - sum(s <= step for s in BAD), 0)
            factor = (updates + 1) / 3 if updates < 3 else 1 - 0.9 * max(updates - 7, 0) / 6
            values = {k: float(v) for k, v in script.metrics(step, total).items() if np.isfinite(v)}
            values |= dict(learning_rate=factor * 0.03 * 0.5, exaflops=tokens * per_token / 1e18)
            expected.append(dict(step=step, tokens=tokens) | values)
        if step % 5 == 0 or step == STEPS:
            nats = float(total) * tokens_seen.sum()
            values = dict(step=step, tokens=tokens, validation_loss=nats / tokens_seen.size)
            values |= dict(validation_bpb=nats / math.log(2) / num_bytes)
            if masked:
                values |= dict(validation_bpb_all=3 * nats / math.log(2) / (2 * num_bytes))
            expected.append(values)
    return [pytest.approx(record, rel=1e-6) for record in expected]


TRACE = """compile; snapshots 0 ['params', 'step'] 0; step 1; step 2; tick; step 3; tick; step 4;
tick; tick; [; checkpoints 4 ['params', 'step'] 32; ]; step 5; tick; [; look at (4, 33);
look at (4, 33); ]; step 6; step 7; tick; tick; [; snapshots 7 ['params', 'step'] 56; ]; step 8;
tick; [; checkpoints 8 ['params', 'step'] 64; ]; step 9; step 10; tick; tick; [; look at (4, 33);
look at (4, 33); ]; step 11; step 12; tick; tick; [; checkpoints 12 ['params', 'step'] 96; ];
step 13; tick; [; look at (4, 33); look at (4, 33); ]; checkpoints 13 ['params', 'step'] 104;
close"""


def test_calls_records_and_output_of_a_run(script, tmp_path, capsys):
    last = script.run()
    expected = expected_records(script)
    assert records(tmp_path / "run") == expected and last == expected[-1]
    assert "; ".join(script.calls) == TRACE.replace("\n", " ")
    timing = metrics.read_records(epath.Path(tmp_path / "run" / metrics.TIMING))
    timing = [record for record in timing if "goodput" not in record]
    laps = [dict(step=n, steps=n) for n in (6, 9, 12, 13)]
    assert timing == [dict(step=1, seconds_to_first_step=SECONDS), *laps]
    folder = epath.Path(tmp_path / "run")
    assert storage.steps(folder / "checkpoints") == [8, 12, 13]
    assert storage.steps(folder / "snapshots") == [0, 7]
    per_token = formulas.training_flops_per_token(script.experiment.model, LENGTH)
    devices = dict(num_devices=2, local_devices=jax.devices()[:2])
    assert script.clock == dict(tokens_per_step=256, flops_per_token=per_token) | devices
    assert script.given[3:] == (None, script.dataset.tokenizer.bos_id)
    yardstick = script.dataset.info["xz_bits_per_byte"]
    options = dict(title="lrkv_small", yardstick=yardstick, mechanism="lrkv", folder=folder)
    assert script.drawn == ((folder,), options)
    out, err = capsys.readouterr()
    total = formulas.parameters(script.experiment.model)["total"]
    cache = formulas.cache_bytes_per_token(script.experiment.model, jnp.dtype("float32"))
    bpb = [f"{r['validation_bpb']:.4f}" for r in records(folder) if "validation_bpb" in r]
    lines = out.splitlines()
    assert lines.pop(6).startswith("goodput: ")
    assert lines == [
        f"lrkv_small: {total:,} parameters, {cache:,} cache bytes per token (float32), 13 steps of "
        "256 tokens, 2 x cpu",
        f"workdir {folder}",
        "first step 12.3 s after launch",
        f"step 5: validation {bpb[0]} bits per byte",
        f"step 10: validation {bpb[1]} bits per byte",
        f"step 13: validation {bpb[2]} bits per byte",
        f"validation: {bpb[2]} bits per byte after 3,328 tokens (xz -9e on the same text: "
        f"{yardstick:.4f}); 12 s in this process",
        f"curves, metrics, sample and checkpoints: {folder}",
        f"with `pip install tensorboard`: tensorboard --logdir {folder}",
    ]
    loss = [r["loss"] for r in records(folder) if "loss" in r][-1]
    assert f"step 13 of 13: loss {loss:.3f}, 1,234 tokens/s" in err
    # A complete run compiles nothing.
    script.calls.clear()
    assert script.run() == expected[-1]
    assert script.calls == ["checkpoints 13 ['params', 'step'] 104", "close"]
    (folder / metrics.METRICS).unlink()
    with pytest.raises(UserError, match=f"^{folder}/metrics.jsonl has lost its records$"):
        script.run()


def test_a_stopped_run_resumes_exactly(script, tmp_path, capsys):
    """The run stops on a signal in or before the first step, on stop_after, or on a full disk."""
    folder = epath.Path(tmp_path / "run")
    goes_on = "The same command goes on from there.\n"

    def kill(number):
        return lambda: os.kill(os.getpid(), number)

    lower = script.lowered_step
    script.lowered_step = lambda: kill(signal.SIGHUP)() or lower()
    with pytest.raises(SystemExit) as ended:
        script.run()
    assert ended.value.code == 129 and storage.steps(folder / "checkpoints") == []
    assert storage.steps(folder / "snapshots") == [0]
    assert f"\nStopped on SIGHUP before the first step. {goes_on}" in capsys.readouterr().out
    script.lowered_step = lower
    script.at = {4: kill(signal.SIGTERM)}
    with pytest.raises(SystemExit) as ended:
        script.run(checkpoint_every=99)
    assert ended.value.code == 75 and storage.steps(folder / "checkpoints") == [4]
    assert f"\nStopped on SIGTERM at step 4 of 13, saved. {goes_on}" in capsys.readouterr().out
    for stop_after in (5, 7):
        assert script.run(stop_after=stop_after) == {}
        assert storage.steps(folder / "checkpoints")[-1] == stop_after
        message = f"\nStopped by train.stop_after at step {stop_after} of 13, saved. {goes_on}"
        assert message in capsys.readouterr().out
    assert storage.steps(folder / "snapshots") == [0, 7]
    # After the first failed save another one follows, after the last none does.
    script.at = {("checkpoints", 8): refuse, ("checkpoints", 9): refuse, ("snapshots", 10): refuse}
    with pytest.raises(UserError) as error:
        script.run(stop_after=9, snapshot_every=10)
    out, err = capsys.readouterr()
    full = "[Errno 28] No space left on device"
    assert f"workdir {folder}, resuming from step 7\n" in out
    assert f"WARNING: {full}; the run goes on, its checkpoints are [4, 5, 7]\n" in err
    assert str(error.value) == (
        f"stopped: {full}. The last checkpoint is intact (steps [4, 5, 7]); fix the cause and "
        "run the same command to resume"
    )
    assert script.run(snapshot_every=10) == expected_records(script)[-1]
    assert f"WARNING: {folder / 'snapshots'}: {full}; the run goes on\n" in capsys.readouterr().err
    assert storage.steps(folder / "snapshots") == [0, 7]
    assert records(folder) == expected_records(script)
    script.at = {}
    script.run("whole")
    whole = tmp_path / "whole"
    assert (folder / metrics.METRICS).read_bytes() == (whole / metrics.METRICS).read_bytes()


def test_failed_records_end_a_run_after_its_state_is_saved(script, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.MetricsWriter, "flush", lambda writer: refuse())
    with pytest.raises(UserError, match=r"No space left on device.*\(steps \[4\]\)"):
        script.run()
    assert storage.steps(epath.Path(tmp_path / "run" / "checkpoints")) == [4]


def test_several_processes(script, tmp_path, monkeypatch, capsys):
    """Processes compile before any begins; a failed save ends them; only the first one writes."""
    gathered = []

    def gather(name, text):
        gathered.append((name, text))
        return [text]

    monkeypatch.setattr(distributed, "gather", gather)
    monkeypatch.setattr(distributed, "count", lambda: 2)
    last = script.run()
    assert last == expected_records(script)[-1]
    assert gathered[-2:] == [("compiled", ""), ("written", "")]
    out, err = capsys.readouterr()
    assert ", 2 x cpu, 2 processes\n" in out and "step 13 of 13" in err
    for target in (("checkpoints", 4), ("snapshots", 7)):
        script.at = {target: refuse}
        with pytest.raises(UserError, match="stopped: .*No space left on device"):
            script.run(target[0])
    script.at = {}
    monkeypatch.setattr(distributed, "index", lambda: 1)
    capsys.readouterr()
    assert script.run() == last  # which the first has written
    assert script.run("second") == {}
    assert "".join(capsys.readouterr()) == ""
    assert {path.name for path in (tmp_path / "second").iterdir()} == {"checkpoints", "snapshots"}


def test_a_run_starts_from_its_parent_and_reads_its_teacher(script, tmp_path, monkeypatch, capsys):
    """The run has a larger vocabulary than its parent, and a loss mask."""
    monkeypatch.setattr(config_lib.Experiment, "is_masked", True)
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    models = {}
    for name, rows, step in (("parent", BYTES, 9), ("teacher", VOCABULARY, 6)):
        folder = epath.Path(tmp_path / name)
        folder.mkdir()
        params = dict(embedding=draw(rows, WIDTH), head=draw(WIDTH, BYTES), total=draw())
        saved = checkpoint.Checkpoints(folder / "kept", keep=None)
        saved.save(step, dict(params=params, step=jnp.int32(step)), 0)
        saved.close()
        model = dataclasses.replace(script.experiment.model, vocab_size=rows)
        experiment = types.SimpleNamespace(model=model)
        models[name] = types.SimpleNamespace(
            **dict(workdir=folder, checkpoints=folder / "kept", step=step),
            **dict(experiment=experiment, params=params),
        )
    script.calls.clear()
    script.run(**models)
    start = models["parent"].params["total"]
    assert records(tmp_path / "run") == expected_records(script, start, masked=True)
    assert script.given[3] is models["teacher"].experiment.model
    jax.tree.map(np.testing.assert_array_equal, script.taught, (models["teacher"].params,))
    began, old = script.began["params"], models["parent"].params
    drawn = script.init(jax.random.key(5))["params"]
    np.testing.assert_array_equal(began["embedding"][:BYTES], old["embedding"])
    np.testing.assert_array_equal(began["embedding"][BYTES:], drawn["embedding"][BYTES:])
    np.testing.assert_array_equal(began["head"][:, :BYTES], old["head"])
    assert not np.any(began["head"][:, BYTES:]) and began["head"].shape == (WIDTH, VOCABULARY)
    evaluations = [r for r in records(tmp_path / "run") if "validation_bpb_all" in r]
    pattern = r"validation (.*) bits per byte of targets that count, (.*) of all"
    printed = re.findall(pattern, capsys.readouterr().out)
    keys = ("validation_bpb", "validation_bpb_all")
    assert (
        printed == [tuple(f"{r[key]:.4f}" for key in keys) for r in evaluations]
        and len(printed) == 3
    )


def test_values_that_end_a_run():
    """Bad steps end a run by its policy; weights that are not finite always do."""
    stop, skip = dict(bad_steps="stop"), dict(bad_steps="skip", max_bad_steps=3)
    fine = dict(loss=4.5, grad_norm=1.0, param_norm=2.0)
    spike = dict(fine, bad=1, mean_loss=1.25)

    def row(n, **values):
        return dict(fine, bad=int(n > 0), bad_steps_in_a_row=n) | values

    over = "loss = 4.5, over config.train.spike_factor = 3.0 times 1.25, the mean of recent losses"
    many = "config.train.max_bad_steps = 3 bad steps in a row"
    for policy, values, wrong in (
        (stop, fine, ""),
        (stop, dict(spike, bad=0), ""),
        (stop, spike, over),
        (stop, fine | dict(loss=math.nan, grad_norm=math.inf), "loss = nan, grad_norm = inf"),
        (stop, spike | dict(loss=math.nan), "loss = nan"),
        (skip, row(2, loss=math.nan), ""),
        (skip, row(3, loss=math.nan), f"loss = nan, {many}"),
        (skip, row(4, mean_loss=1.25), f"{over}, {many}"),
        (skip, row(0), ""),
        (skip, row(0, param_norm=math.nan), "param_norm = nan"),
        (skip, dict(validation_loss=math.inf, validation_bpb=2.0), "validation_loss = inf"),
        (skip, dict(validation_loss=3.0), ""),
    ):
        train = TrainConfig(num_steps=9, batch_size=1, spike_factor=3.0, **policy)
        run = types.SimpleNamespace(
            experiment=types.SimpleNamespace(train=train), _saved_steps=lambda: [3, 6]
        )
        if not wrong:
            loop.TrainingLoop._check_values(run, 7, values)
            continue
        with pytest.raises(UserError) as error:
            loop.TrainingLoop._check_values(run, 7, values)
        start = f"step 7: {wrong}: stopped. Checkpoints of steps [3, 6] are intact; lower config."
        assert str(error.value).startswith(start)
