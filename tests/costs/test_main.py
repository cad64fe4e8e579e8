"""`python -m kvjax.costs`: its tables, the same figures as JSON, and its messages."""

import json
import shutil

import pytest

from kvjax.costs import __main__ as cost_report
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets
from tests import golden


@pytest.fixture
def run(capsys):
    """A function of options: the printed tables and the last line's JSON."""

    def command(*options):
        cost_report.main([*options, "--json", "--markdown"])
        out, text = capsys.readouterr()
        return text, json.loads(out)

    return command


def test_all_that_the_command_says(run, tmp_path):
    """Covers two configs, two chips, of which one is too small for some batches, and nine."""
    for name in ("mha_2p5b", "lrkv_2p5b"):
        shutil.copy(CONFIGS / f"{name}.py", tmp_path)
    options = ("--all", "--details", "--device=v5e", "--device=h200", "--batch=3", "--chips=9")
    text, result = run(f"--config={tmp_path / 'lrkv_2p5b.py'}", *options)
    reports = result.pop("configs")
    decode = [json.dumps(entry) for report in reports for entry in report.pop("decode")]
    lines = [text, json.dumps(result), *map(json.dumps, reports), *decode]
    golden.check_text("\n".join(lines), "costs/printed", rtol=1e-9)


def test_all_configs_of_a_scale_by_cache(run, tmp_path):
    for name in ("lrkv_tiny", "mha_tiny", "gqa_tiny", "mha_128m"):
        shutil.copy(CONFIGS / f"{name}.py", tmp_path)
    _, result = run(f"--config={tmp_path / 'lrkv_tiny.py'}", "--all")
    assert [r["config"] for r in result["configs"]] == ["mha_tiny", "lrkv_tiny", "gqa_tiny"]
    assert list(result["configs"][0]["decode"][0]["largest_batch"]) == list(datasheets.DEVICES)
    own = shutil.copy(CONFIGS / "mqa_tiny.py", tmp_path / "mine.py")  # which names no scale
    assert [r["config"] for r in run(f"--config={own}", "--all")[1]["configs"]] == ["mqa_tiny"]
    (tmp_path / "lrkv_tiny.py").write_text("import no_such_module\n")
    with pytest.raises(UserError, match=r"lrkv_tiny.py: ModuleNotFoundError: No module named"):
        run(f"--config={tmp_path / 'lrkv_tiny.py'}", "--all")


def test_a_quantised_cache(run):
    """LRKV of rank 64 at 2.5B: 36 layers of 2,784 bytes in int8."""
    text, result = run(f"--config={CONFIGS / 'lrkv_2p5b.py'}", "--cache_dtype=int8", "--device=v5e")
    decode = result["configs"][0]["decode"][0]
    assert decode["cache_bytes_per_token"] == 36 * 2784
    assert "cache bytes per token, int8" in text and result["cache_dtype"] == "int8"
    wide = run(f"--config={CONFIGS / 'lrkv_2p5b.py'}", "--device=v5e")[1]["configs"][0]["decode"][0]
    saved = 36 * (5192 - 2784) * 8192 / 1e9
    assert wide["gb_per_token"] - decode["gb_per_token"] == pytest.approx(saved)
    assert decode["largest_batch"]["v5e"] > 1.8 * wide["largest_batch"]["v5e"]


def test_layers_with_a_window_hold_all_tokens(run, tmp_path):
    """A step reads the window alone; memory is that of `largest_batch`."""
    config = tmp_path / "mha_tiny.py"
    shutil.copy(CONFIGS / "mha_tiny.py", config)
    found = {}
    for window in (0, 32):
        options = [f"--config={config}", f"--config.model.window={window}", "--all", "--details"]
        (found[window],) = run(*options, "--device=v5e")[1]["configs"]
    whole, narrow = (found[window]["decode"][0] for window in (0, 32))
    for key in ("cache_gb", "cache_bytes_per_token", "largest_batch"):
        assert whole[key] == narrow[key]
    assert whole["gb_per_token"] > narrow["gb_per_token"]
    options = (f"--config={config}", "--config.model.window=32", "--chips=2", "--device=v5e")
    (found,) = run(*options, "--batch=3")[1]["configs"]
    step = found["decode"][0]
    # Three sequences of 32 tokens in four layers; keys and values of 4 heads of 32 channels.
    cache = (3 * step["gb_per_token"] - step["gb_per_chip_and_step"]["tokens"]) * 2
    assert cache == pytest.approx(1e-9 * 3 * 4 * 32 * 2 * 4 * 32 * 2, rel=1e-6)


def test_keys_that_are_not_quantised_have_the_models_dtype(run, tmp_path):
    """Decoupled RoPE keys, in the table by mechanism as in that by config."""
    for name in ("mla_tiny", "mha_tiny"):
        shutil.copy(CONFIGS / f"{name}.py", tmp_path)
    options = ["--all", "--details", "--dtype=float32", "--cache_dtype=int8"]
    _, result = run(f"--config={tmp_path / 'mla_tiny.py'}", *options)
    for config, by_mechanism in zip(result["configs"], result["by_mechanism"], strict=True):
        assert config["config"] == by_mechanism["config"]
        size = config["decode"][0]["cache_bytes_per_token"]
        assert by_mechanism["cache_bytes_per_token"]["int8"] == size
    with pytest.raises(UserError, match="--cache_dtype = 'fp8': must be one of '', 'int8', 'int4'"):
        run(f"--config={CONFIGS / 'lrkv_2p5b.py'}", "--cache_dtype=fp8")


def test_without_chips_there_are_no_figures_of_chips(run):
    text, result = run(f"--config={CONFIGS / 'lrkv_2p5b.py'}")
    assert (result["batch"], result["chips"]) == (1, 1) and "chips" not in text
    assert "cache_bytes_per_token_and_chip" not in result["configs"][0]
    assert "gb_per_chip_and_step" not in result["configs"][0]["decode"][0]


def test_overrides_and_dtype(run):
    path = f"--config={CONFIGS / 'mha_tiny.py'}"
    sizes = [
        run(path, *options)[1]["configs"][0]["decode"][0]["cache_bytes_per_token"]
        for options in ([], ["--dtype=float32"], ["--config.model.num_layers=2"])
    ]
    assert sizes[1:] == [2 * sizes[0], sizes[0] // 2]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device=b200"], "--device: 'b200' is none of h100, h200, a100, l4, v4, v5e, v5p, v6e"),
        (["--batch=0"], "--batch = 0: must be at least 1"),
        (["--chips=0"], "--chips = 0: must be at least 1"),
        (["--dtype=int8"], "--dtype = 'int8': must be one of 'bfloat16', 'float32'"),
        (["--config=nowhere/x.py", "--all"], "no such file"),
        (["--config.attention.num_heads=0"], "config.attention.num_heads = 0"),
    ],
)
def test_bad_options(capsys, options, message):
    assert command_line.status(cost_report.main, options) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvjax: ") and message in captured.err
    assert not captured.out
