"""The training benchmark: its runs, figures and failures."""

import json
import os
import subprocess
import sys
import types

import jax
import pytest

from experiments.benchmarks import contender, runner, train_benchmark as benchmark
from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets

MHA, LRKV = "configs/mha_128m.py", "configs/lrkv_128m.py"
ONE = dict(rows=None, steps=2)


def _cells(row):
    _, (cells,) = runner.table(benchmark.COLUMNS, [row])
    return cells


def _gpu(kind):
    return types.SimpleNamespace(platform="gpu", device_kind=kind)


# -- what is run -----------------------------------------------------------------------------------


def test_rows_and_keys_change_the_config():
    run = benchmark.our_run(MHA, "compute.remat=none train.grad_accumulation=2", rows=32, steps=5)
    assert run.experiment.tokens_per_step == 32 * 2048 == 65_536
    assert run.experiment.compute.remat == "none"
    assert run.experiment.train.grad_accumulation == 2
    assert run.name == "mha_128m compute.remat=none train.grad_accumulation=2"
    assert run.arguments["overrides"][-1] == "train.batch_size=32"
    assert benchmark.our_run(MHA, "", **ONE).experiment.tokens_per_step == 524_288


def test_pytorch_has_the_configs_shape(monkeypatch):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: True)
    options = dict(rows=32, steps=3, attention=["flash", "cudnn"], mode="default")
    options |= dict(changes=["compute.remat=none", "compute.remat=dots"])
    runs = benchmark.runs_of([MHA, LRKV], **options)
    assert [run.name for run in runs] == [
        "PyTorch mha_128m, flash attention",
        "PyTorch mha_128m, cudnn attention",
        "mha_128m compute.remat=none",
        "mha_128m compute.remat=dots",
        "lrkv_128m compute.remat=none",
        "lrkv_128m compute.remat=dots",
    ]
    given = runs[1].arguments
    assert given["parameters"] == 185_597_952
    assert (given["rows"], given["length"], given["parts"]) == (32, 2048, 1)
    assert given["attention"] == "cudnn"
    shape = given["shape"]
    assert (shape["num_layers"], shape["d_model"], shape["mlp_dim"]) == (12, 768, 3072)
    assert (shape["num_heads"], shape["head_dim"], shape["vocab_size"]) == (6, 128, 65_536)
    assert all(json.dumps(run.arguments) for run in runs)


@pytest.mark.parametrize(
    "changes",
    [
        "model.activation=gelu",
        "model.logit_softcap=0.0",
        "attention.qk_norm=none",
        "attention.num_bases=3",
        "optimizer.orthogonalize=per_head",
    ],
)
def test_pytorch_refuses_other_models(changes):
    experiment = benchmark.our_run(MHA, changes, **ONE).experiment
    with pytest.raises(UserError, match="mha_128m is not the recipe's MHA"):
        benchmark.torch_run(experiment, "flash", "default", 1)


def test_pytorch_needs_an_mha_config_and_an_installation(monkeypatch):
    options = dict(changes=[], attention=["flash"], mode="default", **ONE)
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="PyTorch is not installed"):
        benchmark.runs_of([MHA], **options)
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="lrkv_128m is not the recipe's MHA"):
        benchmark.runs_of([LRKV], **options)
    with pytest.raises(UserError, match="--torch_attention = 'flsh': must be one of 'flash'"):
        benchmark.runs_of([MHA], **options | dict(attention=["flsh"]))


# -- figures ---------------------------------------------------------------------------------------


def test_a_steps_time_is_between_ends_with_the_next_one_dispatched(monkeypatch):
    log, clock = [], iter([10.0, 11.0, 13.0, 16.0, 20.0])
    monkeypatch.setattr(contender.time, "perf_counter", lambda: next(clock))
    dispatched = iter(range(100))

    def dispatch():
        log.append(("dispatch", step := next(dispatched)))
        return step

    def wait(step):
        log.append(("wait", step))

    assert contender.step_seconds(dispatch, wait, steps=3, warmup=2) == [2.0, 3.0, 4.0]
    dispatches = [("dispatch", n) for n in range(6)]
    waits = [("wait", n) for n in range(6)]
    between = [event for n in range(5) for event in (dispatches[n + 1], waits[n])]
    assert log == [dispatches[0], *between, waits[5]]


def test_mfu_is_of_the_datasheet_and_of_all_devices():
    run = benchmark.our_run(MHA, "", rows=32, steps=3)
    measured = dict(seconds=[0.2, 0.1, 0.16], first_step_seconds=9.0, loss=1.5, peak_bytes=7e9)
    row = benchmark.figures(run, measured | dict(count=1))
    assert row["tokens_per_second"] == 65_536 / 0.16
    assert (row["slowest"], row["fastest"]) == (65_536 / 0.2, 65_536 / 0.1)
    flops = 6 * (185_597_952 - 65_536 * 768 + 12 * 2048 * 6 * 2 * 128)  # per token
    assert row["gflops"] * 1e9 == pytest.approx(flops * 65_536 / 0.16)
    h200 = datasheets.for_device(_gpu("NVIDIA H200"))
    one = benchmark.with_rates(row, 700e12, h200)
    assert one["mfu"] == pytest.approx(row["gflops"] * 1e9 / 989e12)
    assert one["of_matmul"] == pytest.approx(row["gflops"] * 1e9 / 700e12)
    four = benchmark.with_rates(row | dict(count=4), 700e12, h200)
    assert four["mfu"] == pytest.approx(one["mfu"] / 4)
    name, rate, extremes, _, *shown = _cells(one)
    assert (name, rate, extremes) == ("mha_128m", "409,600", "327,680 to 655,360")
    assert shown == [f"{one['mfu']:.1%}", f"{one['of_matmul']:.1%}", "9.0", "7.0", "1.500"]


def test_unknown_values_are_empty_cells():
    run = benchmark.our_run(MHA, "", rows=32, steps=1)
    measured = dict(seconds=[0.1], first_step_seconds=9.0, loss=1.5, peak_bytes=None, count=1)
    row = benchmark.with_rates(benchmark.figures(run, measured), None, None)
    assert (row["mfu"], row["of_matmul"]) == (None, None)
    assert _cells(row)[-5:] == ["", "", "9.0", "", "1.500"]


def test_each_device_has_its_own_record():
    assert benchmark.result_name(jax.devices("cpu")[0]) == "train_benchmark"
    assert benchmark.result_name(_gpu("NVIDIA H200")) == "train_benchmark_h200"
    assert benchmark.result_name(_gpu("NVIDIA H100 80GB HBM3")) == "train_benchmark_h100"
    assert benchmark.result_name(_gpu("NVIDIA L40S")) == "train_benchmark_nvidia_l40s"


# -- processes -------------------------------------------------------------------------------------


def test_a_process_that_ends_without_a_result_is_an_error(monkeypatch):
    monkeypatch.setattr(contender, "_CHILD", "import os; os.kill(os.getpid(), 9)")
    result = contender.run("experiments.benchmarks.jax_training", {})
    said = "experiments.benchmarks.jax_training ended with status -9, without a result"
    assert result == dict(error=said)


@pytest.mark.slow
def test_a_users_mistake_is_a_line_and_a_bug_a_traceback_too(capfd):
    none = dict(path="configs/none_tiny.py", overrides=[], steps=1)
    error = contender.run("experiments.benchmarks.jax_training", none)["error"]
    assert error.startswith("--config=configs/none_tiny.py: no such file")
    assert not capfd.readouterr().err
    error = contender.run("experiments.benchmarks.jax_training", dict(path="configs/mha_tiny.py"))[
        "error"
    ]
    assert error.startswith("TypeError: training_speed() missing")
    assert "Traceback" in capfd.readouterr().err


def test_output_of_libraries_is_no_result(monkeypatch):
    printed = 'warning\nresult: {"loss": 1.5}\n3 caches written\n'
    done = subprocess.CompletedProcess([], 0, stdout=printed)
    monkeypatch.setattr(contender.subprocess, "run", lambda *args, **kwargs: done)
    assert contender.run("x", {}) == dict(loss=1.5)


def test_rows_of_other_devices_are_failures(monkeypatch, capsys):
    """CPU-only PyTorch beside JAX on a GPU, say."""
    answers = iter([dict(platform="cuda"), dict(error="no"), dict(platform="cpu")])
    measured = dict(seconds=[0.1], first_step_seconds=9.0, loss=1.5, peak_bytes=None, count=1)
    monkeypatch.setattr(contender, "run", lambda *_: measured | next(answers))
    run = benchmark.our_run(MHA, "", rows=32, steps=1)
    rows, failed, _ = benchmark.measure([run] * 3)
    assert [row["platform"] for row in rows] == ["cuda"]
    assert [f["error"] for f in failed] == ["no", "ran on cpu, others on cuda: no comparison"]


@pytest.mark.slow
def test_a_failed_run_does_not_end_others_and_data_is_not_imported(tmp_path):
    """Runs the command with JAX, Flax and Optax alone."""
    absent = "grain tensorflow_datasets array_record tensorboardX tokenizers pyarrow matplotlib"
    for name in absent.split():
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')")
    small = "model.num_layers=1 train.batch_size=2 data.sequence_length=16"
    command = [
        *(
            sys.executable,
            "-m",
            "experiments.benchmarks.train_benchmark",
            "--config=configs/mha_tiny.py",
        ),
        *("--steps=2", f"--set={small} compute.attention=cudnn", f"--set={small}"),
        *("--json", "--markdown"),
    ]
    done = subprocess.run(
        command,
        env=os.environ | dict(PYTHONPATH=str(tmp_path)),
        cwd=benchmark.CONFIGS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["name"] == "train_benchmark" and result["device"] == "cpu"
    (row,), (failure,) = result["rows"], result["failed"]
    assert row["config"] == f"mha_tiny {small}" and row["tokens_per_step"] == 32
    assert row["tokens_per_second"] > 0 and row["mfu"] is None
    assert failure["config"] == f"mha_tiny {small} compute.attention=cudnn"
    assert failure["error"].startswith("NotImplementedError: cudnn attention: dtypes float32")
    assert f"failed: {failure['config']}: {failure['error']}" in done.stderr
