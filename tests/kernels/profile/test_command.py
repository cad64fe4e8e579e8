"""`python -m kvjax.kernels.profile`: options, messages, results and optional packages."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest

from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT
from kvjax.hardware import datasheets
from kvjax.kernels.decode_attention import shapes, tuning
from kvjax.kernels.profile import __main__ as profile, agreement, measured, tpu_static


@pytest.fixture
def command(capsys):
    def run(*options):
        profile.main([*options, "--json", "--markdown"])
        out, text = capsys.readouterr()
        return text, json.loads(out)

    return run


@pytest.fixture
def nothing_measured(monkeypatch):
    """Replaces measuring and tuning by functions that return nothing; a list of their runs."""
    runs = []
    monkeypatch.setattr(measured, "measure", lambda run, _: (runs.append(run), ([], 2e9))[1])
    monkeypatch.setattr(measured, "tune", lambda run, _: (runs.append(run), [])[1])
    return runs


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device=b200"], "--device: invalid choice: 'b200' (choose from 'h100', 'h200', 'a100'"),
        (["--mechanisms=mha,mba"], "'mba' is none of mha, gqa, mqa, thin_keys,"),
        (["--implementations=xlb"], "'xlb' is none of xla, "),
        (["--batch=0"], "--batch '0': must be integers of 1 or more"),
        (["--blocks=512"], "must be two sizes, the smaller first"),
        (["--blocks=1024,512"], "must be two sizes, the smaller first"),
        (["--device=v5e", "--plot=x.png"], "--plot=x.png: --plot needs measurements"),
        (["--tune", "--plot=x.png"], "--tune --plot=x.png: --plot needs measurements"),
        (["--device=h100", "--tune"], "--tune --device=h100: needs the device"),
        (["--check", "--tune"], "--check --tune: use one of them"),
        (["--check", "--device=v5e"], "--check --device=v5e: needs the device"),
        (["--check", "--implementations=cudnn"], "--check: takes xla, tpu, gpu, reference"),
        (["--save=/dev/null/x.json"], "--save = '/dev/null': "),
        (["--plot=/dev/null/x.png"], "--plot = '/dev/null': "),
    ],
)
def test_bad_options_are_one_line(nothing_measured, capsys, monkeypatch, options, message):
    monkeypatch.setattr(profile, "_matplotlib", lambda file: None)
    assert command_line.status(profile.main, options) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("kvjax: ") and captured.err.count("\n") == 1
    assert message in captured.err and not nothing_measured


def test_a_tpu_that_is_absent(command, monkeypatch, tmp_path):
    file = tmp_path / "v5e.json"

    def per_token(chip, model, mechanism, *, tile_kv=1024):
        assert (chip.name, model) == ("v5e", "d36")
        if mechanism == "mha":
            raise NotImplementedError("the kernel takes no MHA")
        if mechanism == "gqa" and tile_kv == 512:
            raise tpu_static.DoesNotCompile("tile_kv 512: no")
        slow = 10.0 if mechanism == "mqa" else 0.0
        return tpu_static.PerToken(3.0 + slow + 1024 / tile_kv, dict(MXU=2.0, XLU=0.0))

    monkeypatch.setattr(tpu_static, "per_token", per_token)
    text, result = command("--device=v5e", "--mechanisms=mha,lrkv,gqa,mqa", f"--save={file}")
    assert (result["device"], result["static"]) == ("v5e", True)
    mha, lrkv, gqa, mqa = result["rows"]
    assert mha["why"] == "the kernel takes no MHA" and "the kernel takes no MHA" in text
    assert lrkv["static"] and lrkv["bytes"] == 5192
    assert (lrkv["bundles"], lrkv["bundles_in_a_block"], lrkv["bundles_per_block"]) == (4, 3, 1024)
    assert gqa["bundles"] == 4 and gqa["without_blocks"] == "tile_kv 512: no"
    assert lrkv["of_hbm"] == pytest.approx(4 / 9.528, rel=1e-3) and lrkv["bandwidth_bound"]
    assert text.startswith("static, v5e") and "yes, by 2.38x" in text
    assert not mqa["bandwidth_bound"] and "no, 14.90x over" in text
    assert "| MXU |" in text and "XLU" not in text  # units that do nothing have no column
    saved = json.loads(file.read_text())
    made_by = saved.pop("made_by")
    assert saved == result and made_by["packages"]["jax"] == jax.__version__


def test_a_static_entry_is_labelled_so(command, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FILE", tmp_path / "tuned.json")
    tuning.FILE.write_text("{}")

    def per_token(chip, model, mechanism, *, tile_kv=128):
        if tile_kv > 1024 or mechanism == "mha":
            raise tpu_static.DoesNotCompile(f"too large at {tile_kv}")
        return tpu_static.PerToken(tile_kv if mechanism == "gqa" else 1 / tile_kv, {})

    sizes = [dict(tile_kv=tile_kv) for tile_kv in (512, 1024, 2048)]
    monkeypatch.setattr(measured, "candidates", lambda *_: [{}, *sizes])

    monkeypatch.setattr(tpu_static, "per_token", per_token)
    options = ("--device=v5p", "--mechanisms=lrkv,mha,gqa", "--tune", "--length=4096,1024")
    text, result = command(*options)
    key = "tpu/residual_rotated_normed/bfloat16-N18-K18-J1-R64-H128-V128-B1-S1024"
    facts = dict(bundles_per_token=1 / 1024, by_default=1 / 128, tried=3)
    assert result["tuned"] == [
        dict(mechanism="lrkv", key=key, parameters=dict(tile_kv=1024)) | facts,
        dict(mechanism="mha", why="too large at 128"),
        dict(mechanism="gqa", why=measured.NOTHING_FASTER)
        | dict(bundles_per_token=128, by_default=128, tried=3),
    ]
    assert text.splitlines() == [
        f"lrkv tpu: {{'tile_kv': 1024}} under {key}",
        "mha tpu: too large at 128",
        f"gqa tpu: {measured.NOTHING_FASTER}",
    ]
    entry = dict(parameters=dict(tile_kv=1024), source="static") | facts
    assert json.loads(tuning.FILE.read_text()) == {"TPU v5": {key: entry}}


def test_a_gpu_that_is_absent(command, monkeypatch, capsys):
    def resources(shape, *, batch, length, device):
        assert (batch, length, device) == (1, 1024, "h200")
        if shape.K == 18:
            raise ValueError("too many heads")
        return dict(registers=168, spill_bytes=0, shared_bytes=224_256)

    fake = types.SimpleNamespace(resources=resources)
    monkeypatch.setitem(sys.modules, "kvjax.kernels.profile.gpu_static", fake)
    text, result = command("--device=h200", "--mechanisms=mha,gqa", "--length=1024")
    assert [r.get("registers") for r in result["rows"]] == [None, 168]
    assert "| gqa | 1 | 1,024 | 168 | 0 | 224,256 |" in text and "too many heads" in text
    monkeypatch.setitem(sys.modules, "kvjax.kernels.profile.gpu_static", None)
    assert command_line.status(profile.main, ["--device=h200"]) == 2
    assert "--device=h200: its compiler is not installed" in capsys.readouterr().err


def test_resources_reported_by_a_gpus_compiler(monkeypatch):
    gpu_static = pytest.importorskip("kvjax.kernels.profile.gpu_static")
    compiled = []

    def compile_for(device, function, inputs, cache, first_B, compiler_options):
        compiled.append((device, cache["base_key"].shape, cache["base_key"].dtype, first_B.shape))
        assert os.environ["MOSAIC_GPU_DUMP_PTX"] == "1" and first_B.dtype == jnp.int32
        assert not jax.config.jax_enable_compilation_cache
        folder = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
        assert compiler_options["xla_dump_to"] == str(folder)
        report = "ptxas info: 12 bytes spill stores, 34 bytes spill loads\nUsed 56 registers"
        for name, size in (("decode_attention_0", 789), ("combine_splits_1", 5)):
            (folder / f"{name}.ptxas").write_text(report)
            (folder / f"{name}.resources.txt").write_text(f"smem_scratch_bytes={size}")
            (folder / f"{name}.ptx").write_text(f"PTX of {name}")
        return "program"

    monkeypatch.setattr(gpu_static.topology, "gpu_device", lambda name: f"a {name}")
    monkeypatch.setattr(gpu_static.topology, "compile_for", compile_for)
    shape, sizes = shapes.SHAPES["d12"]["gqa"], dict(batch=2, length=256)
    figures = dict(registers=56, spill_bytes=12, shared_bytes=789)
    assert gpu_static.resources(shape, **sizes, device="h100") == figures
    kernels, program = gpu_static.compiled(shape, **sizes)
    assert program == "program" and kernels == dict(
        decode_attention=(figures, "PTX of decode_attention_0"),
        combine_splits=(figures | dict(shared_bytes=5), "PTX of combine_splits_1"),
    )
    assert gpu_static.resources(shape, **sizes) == figures
    for (device, *arrays), name in zip(compiled, ("h100", "h200", "h200"), strict=True):
        assert (device, arrays) == (f"a {name}", [(2, 3, 128, 256), jnp.bfloat16, (2,)])


@pytest.mark.slow
def test_runs_with_jax_alone(tmp_path):
    """On the CPU, from outside the checkout, without training's packages."""
    program = """
import sys
BLOCKED = ("grain", "tensorflow_datasets", "tensorflow", "array_record", "ml_collections",
           "matplotlib", "psutil", "tokenizers", "pyarrow", "tqdm",
           "torch", "experiments")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"{b}." for b in BLOCKED)) or name in BLOCKED:
            raise ImportError(f"blocked: {name}")
sys.meta_path.insert(0, Blocker())
from kvjax.kernels.profile import __main__ as profile, timing
timing._COPY_BYTES, timing.ON_CHIP_BYTES["cpu"] = 2**20, 1
timing.copy.__kwdefaults__["num_bytes"] = 2**20
profile.main(["--json", "--model=d12", "--mechanisms=gqa", "--length=256", "--rounds=2",
              "--milliseconds=1", "--implementations=xla,cudnn,torch"])
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=dict(
            PATH="/usr/bin",
            JAX_PLATFORMS="cpu",
            PYTHONPATH=str(ROOT),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "measured, cpu, float32" in run.stderr
    result = json.loads(run.stdout)
    rows = {r["implementation"]: r for r in result["rows"]}
    assert list(rows) == ["xla", "cudnn", "torch"]
    xla = rows["xla"]  # on a busy machine a run this short may be refused as noise
    assert xla.get("cache_bytes") == 256 * 2 * 3 * 128 * 4 or "noise" in xla["why"]
    assert rows["cudnn"]["why"] == "there is no GPU"
    assert "torch" in rows["torch"]["why"].lower()


def test_a_plot_has_a_line_per_contender(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    figures, original = [], figure.Figure

    def keep(**options):
        figures.append(original(**options))
        return figures[-1]

    monkeypatch.setattr(figure, "Figure", keep)
    names = dict(mechanism="mha", implementation="xla", batch=1)
    rows = [dict(names, length=n, gbps=2.5 * n) for n in (1, 2)] + [dict(names, why="not")]
    rows += [dict(names, batch=8, length=3, gbps=4.0)]
    profile.plot(rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    ((axes,),) = (figure.axes for figure in figures)
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {
        "mha xla, batch 1": [[1, 2.5], [2, 5.0]],
        "mha xla, batch 8": [[3, 4.0]],
    }
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == list(lines)
    labels = (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel(), axes.get_ylabel())
    assert labels == ("log", "linear", "cached tokens", "GB/s of cache")


def test_defaults_are_small_on_a_cpu(command, nothing_measured, monkeypatch):
    monkeypatch.setattr(agreement, "check", lambda run, _: nothing_measured.append(run) or [])
    for options in ([], ["--check"], ["--tune"], ["--batch=1"]):
        profile.main(options)
        run = nothing_measured.pop()
        assert run.rounds == 3 and len(run.points) == 2
        for batch, length in run.points:
            rings = [measured._ring_bytes(run, name, batch, length) for name in run.mechanisms]
            assert sum(sorted(rings)[-2:]) < 1 << 30, (options, batch, length)


def test_the_usual_sweep_is_over_lengths_then_over_batches(command, nothing_measured, monkeypatch):
    monkeypatch.setattr(profile.datasheets, "for_device", lambda device: datasheets.get("h200"))
    for options in ([], ["--batch=2"], ["--length=8,9"], ["--batch=2,3", "--length=8"]):
        text, result = command(*options)
        assert result == dict(
            name="kernels",
            op="decode_attention",
            model="d36",
            device="h200",
            static=False,
            rows=[],
            copy_gbps=2.0,
        )
        assert text.startswith("measured, cpu, bfloat16: median and extremes of 3 rounds")
        assert "4,800 by datasheet, 2.0 for a copy (read and written)" in text
    default, *with_options = nothing_measured
    assert default.points[:5] == tuple((1, n) for n in (1024, 4096, 16384, 65536, 131072))
    assert default.points[5:] == tuple((2**i, 32_768) for i in range(7))
    assert (default.target, default.device, default.model) == (0.05, "h200", "d36")
    assert default.implementations == ("xla",)
    assert default.mechanisms == ("mha", "gqa", "lrkv", "lrkv_no_rope", "mla")
    assert with_options[0].points == tuple((2, n) for _, n in default.points[:5])
    assert [run.points for run in with_options[1:]] == [((1, 8), (1, 9)), ((2, 8), (3, 8))]


def test_rows_are_printed_as_they_are_measured(nothing_measured, monkeypatch, capsys):
    names = dict(mechanism="mha", implementation="xla", batch=8, length=4096)
    seconds = dict(median=2e-6, low=1e-6, high=3e-6)

    def killed(run, on_row):
        on_row(names | dict(gbps=1234.5, seconds=seconds))
        on_row(names | dict(why="no"))
        on_row(names | dict(worst=0.5, agrees=False))
        on_row(names | dict(seconds=2e-6, parameters=dict(split=512)))
        raise KeyboardInterrupt

    monkeypatch.setattr(measured, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        profile.main([])
    printed = [line.partition("8 x 4,096: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in printed if line] == [
        "1.0 to 3.0 us, 1,234.5 GB/s",
        "no",
        "worst 5.0e-01, WRONG",
        "2.0 us with {'split': 512}",
    ]


def test_a_plot_without_matplotlib_is_refused_before_the_run(nothing_measured, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command_line.status(profile.main, ["--plot=x.png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err and not nothing_measured


def test_results_are_saved_though_the_plot_fails(nothing_measured, monkeypatch, tmp_path):
    def plot(rows, file):
        raise OSError("disk")

    monkeypatch.setattr(profile, "plot", plot)
    monkeypatch.setattr(profile, "_matplotlib", lambda file: None)
    assert (
        command_line.status(profile.main, [f"--save={tmp_path}/x.json", f"--plot={tmp_path}/x.png"])
        == 2
    )
    assert (tmp_path / "x.json").exists()


def test_a_gpus_report_is_not_from_the_compilation_cache(tmp_path):
    """Counts entries of the cache, which is on before and after."""
    gpu_static = pytest.importorskip("kvjax.kernels.profile.gpu_static")
    options = dict(
        jax_enable_compilation_cache=True,
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    )
    before = {name: getattr(jax.config, name) for name in options}

    def fill(value):
        return jax.jit(lambda: jnp.full((3,), value)).lower().compile()

    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        fill(1.0)
        entries = len(list(tmp_path.iterdir()))
        assert entries
        with gpu_static.without_compilation_cache():
            fill(2.0)
        assert len(list(tmp_path.iterdir())) == entries
        fill(3.0)
        assert len(list(tmp_path.iterdir())) > entries
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
